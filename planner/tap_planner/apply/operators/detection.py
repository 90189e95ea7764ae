"""Sampling of images and boxes: RoiAlign, GridSample, NonMaxSuppression and the like."""
