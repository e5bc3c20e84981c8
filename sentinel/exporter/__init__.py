"""The NVML exporter: `sentinel exporter`, for hosts without DCGM."""
