"""Clusters: cluster.yaml and the shorthand, the device catalogue, meshes on the topology."""

from tap_planner.cluster.catalogue import CatalogueEntry, catalogue_device, catalogue_entry, device_names
from tap_planner.cluster.linting import lint
from tap_planner.cluster.loading import load_cluster, parse_cluster
from tap_planner.cluster.meshes import Mesh, MeshAxis, axis_levels, enumerate_meshes, parse_mesh
from tap_planner.cluster.types import STAND_INS, Cluster, Device, Level, NodeGroup, slowest_device

__all__ = [
    "STAND_INS",
    "CatalogueEntry",
    "Cluster",
    "Device",
    "Level",
    "Mesh",
    "MeshAxis",
    "NodeGroup",
    "axis_levels",
    "catalogue_device",
    "catalogue_entry",
    "device_names",
    "enumerate_meshes",
    "lint",
    "load_cluster",
    "parse_cluster",
    "parse_mesh",
    "slowest_device",
]
