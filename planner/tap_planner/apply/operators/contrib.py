"""Fused operators of the com.microsoft domain."""
