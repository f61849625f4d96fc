"""The names of `sk` in the groups of the reference: what type checkers see, and `sk` imports at their first use."""

# meshes and devices
from shardkit.meshes.mesh import make_mesh as make_mesh
from shardkit.meshes.mesh import abstract_mesh as abstract_mesh
from shardkit.meshes.mesh import make_hybrid_mesh as make_hybrid_mesh
from shardkit.meshes.simulated import simulate_devices as simulate_devices
from shardkit.runtime.cluster.config import DistributedConfig as DistributedConfig
from shardkit.meshes.inspection import describe as describe

# layouts
from shardkit.meshes.layout import shard as shard
from shardkit.meshes.layout import local_shape as local_shape
from shardkit.meshes.layout import bytes_per_device as bytes_per_device
from shardkit.meshes.layout import specs_from_rules as specs_from_rules
from shardkit.resharding.reshard import reshard as reshard
from shardkit.resharding.reshard import reshard_steps as reshard_steps

# train steps
from shardkit.steps.builder import make_train_step as make_train_step
from shardkit.steps.evaluate import make_eval_step as make_eval_step
from shardkit.steps.diloco import diloco as diloco
from shardkit.on_device.gradient import value_and_grad as value_and_grad
from shardkit.on_device.gradient import GradFn as GradFn
from shardkit.on_device.means import Mean as Mean
from shardkit.on_device.precision import Precision as Precision
from shardkit.steps.state import TrainState as TrainState
from shardkit.steps.builder import TrainStep as TrainStep
from shardkit.on_device.residuals import init_residuals as init_residuals
from shardkit.plans.storage import unpadded as unpadded

# plans
from shardkit.strategies.data import dp as dp
from shardkit.strategies.zero import zero1 as zero1
from shardkit.strategies.zero import zero2 as zero2
from shardkit.strategies.zero import fsdp as fsdp
from shardkit.strategies.tensor import tp as tp
from shardkit.strategies.context import cp as cp
from shardkit.strategies.expert import ep as ep
from shardkit.optimizers.muon import muon as muon
from shardkit.strategies.pipeline import pp as pp
from shardkit.plans.plan import chain as chain
from shardkit.plans.plan import strategy as strategy
from shardkit.plans.plan import Plan as Plan
from shardkit.plans.splits import Split as Split

# pipelines
from shardkit.strategies.pipeline import pipeline as pipeline
from shardkit.meshes.submeshes import submeshes as submeshes
from shardkit.pipelines.device_put import device_put_value_and_grad as device_put_value_and_grad

# layer by layer
from shardkit.remat.layers import gathered as gathered
from shardkit.remat.layers import scan_layers as scan_layers

# collectives
from shardkit.collectives import vary as vary
from shardkit.collectives import vary_like as vary_like
from shardkit.collectives import all_reduce as all_reduce
from shardkit.collectives import all_gather as all_gather
from shardkit.collectives import reduce_scatter as reduce_scatter
from shardkit.collectives import all_to_all as all_to_all
from shardkit.collectives import shift as shift
from shardkit.collectives import broadcast as broadcast
from shardkit.collectives import all_gather_matmul as all_gather_matmul
from shardkit.collectives import matmul_reduce_scatter as matmul_reduce_scatter
from shardkit.collectives import axis_index as axis_index
from shardkit.collectives import axis_size as axis_size
from shardkit.collectives import ring as ring
from shardkit.collectives import hierarchical as hierarchical
from shardkit.collectives import compressed as compressed
from shardkit.collectives import algorithms as algorithms
from shardkit.collectives import tables as tables

# random numbers
from shardkit.meshes.rng import example_keys as example_keys
from shardkit.meshes.rng import fold_axes as fold_axes
from shardkit.meshes.rng import fold_axis as fold_axis
from shardkit.meshes.rng import fold_keys as fold_keys
from shardkit.meshes.rng import step_key as step_key
from shardkit.meshes.rng import dropout as dropout

# reading programs
from shardkit.analysis import aot as aot
from shardkit.analysis import audit as audit
from shardkit.analysis import census as census
from shardkit.analysis import collective as collective
from shardkit.analysis import expects as expects
from shardkit.analysis import explain as explain
from shardkit.analysis import Finding as Finding
from shardkit.analysis import lint as lint

# rooms, which `from shardkit import *` leaves out
from shardkit import analysis as analysis
from shardkit import bench as bench
from shardkit import collectives as collectives
from shardkit import cost as cost
from shardkit import layers as layers
from shardkit import models as models
from shardkit import planner as planner
from shardkit import runtime as runtime
from shardkit import schedules as schedules
from shardkit import testing as testing
from shardkit import viz as viz

__all__: list[str]
__version__: str
