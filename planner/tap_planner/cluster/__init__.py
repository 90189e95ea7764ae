"""Clusters: cluster.yaml and the shorthand, the device catalogue, meshes on the topology."""

from tap_planner.cluster.calibration import (
    CalibratedDevice,
    CalibratedLevel,
    Calibration,
    FitRow,
    calibrated,
    calibration_text,
)
from tap_planner.cluster.calibration_files import load_calibration, parse_calibration
from tap_planner.cluster.catalogue import CatalogueEntry, catalogue_device, catalogue_entry, device_names
from tap_planner.cluster.json_form import cluster_from_json, cluster_to_json
from tap_planner.cluster.linting import lint
from tap_planner.cluster.loading import load_cluster, parse_cluster
from tap_planner.cluster.meshes import (
    PIPELINE,
    Mesh,
    MeshAxis,
    alike_stages,
    axis_levels,
    enumerate_meshes,
    idle_boxes,
    mesh_on,
    mesh_places,
    parse_mesh,
    part_of,
    stage_kinds,
)
from tap_planner.cluster.paces import NETWORK, USUAL_COLLECTIVE_LAUNCH_NS, kind_of_link, usual_paces, with_usual_paces
from tap_planner.cluster.reserves import USUAL_COLLECTIVE_BUFFERS_BYTES, usual_reserve
from tap_planner.cluster.subsets import device_parts, friendly_counts, restricted, unused_boxes
from tap_planner.cluster.types import (
    ALGORITHMS,
    STAND_INS,
    TRANSPORTS,
    Cluster,
    Device,
    Level,
    NodeGroup,
    Pace,
    slowest_device,
)

__all__ = [
    "ALGORITHMS",
    "NETWORK",
    "PIPELINE",
    "STAND_INS",
    "TRANSPORTS",
    "USUAL_COLLECTIVE_BUFFERS_BYTES",
    "USUAL_COLLECTIVE_LAUNCH_NS",
    "CalibratedDevice",
    "CalibratedLevel",
    "Calibration",
    "CatalogueEntry",
    "Cluster",
    "Device",
    "FitRow",
    "Level",
    "Mesh",
    "MeshAxis",
    "NodeGroup",
    "Pace",
    "alike_stages",
    "axis_levels",
    "calibrated",
    "calibration_text",
    "catalogue_device",
    "catalogue_entry",
    "cluster_from_json",
    "cluster_to_json",
    "device_names",
    "device_parts",
    "enumerate_meshes",
    "friendly_counts",
    "idle_boxes",
    "kind_of_link",
    "lint",
    "load_calibration",
    "load_cluster",
    "mesh_on",
    "mesh_places",
    "parse_calibration",
    "parse_cluster",
    "parse_mesh",
    "part_of",
    "restricted",
    "slowest_device",
    "stage_kinds",
    "unused_boxes",
    "usual_paces",
    "usual_reserve",
    "with_usual_paces",
]
