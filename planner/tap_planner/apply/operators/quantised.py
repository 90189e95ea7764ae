"""Quantisation: QDQ and QOperator forms, packed weights."""
