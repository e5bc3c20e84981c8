"""Estimators in the scikit-learn manner, and what is built on them. Numeric and pure."""
