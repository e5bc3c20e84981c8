"""The ways to tell a scheduler what to do."""
