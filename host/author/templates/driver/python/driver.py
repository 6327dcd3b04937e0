"""Offers nodes below /dev as devices.

Every call runs in a fresh instance of this program, in the state that `componentize-py` recorded after it imported this module.
Variables do not keep their value until the next call: state that must persist goes into the memo of a claim.
"""

from componentize_py_types import Err, Ok
from wit_world import exports
from wit_world.exports.identity import Capabilities, DriverInfo, Limits
from wit_world.imports import device_nodes
from wit_world.imports.claims import PreparedClaim, PreparedDevice, PrepareOutcome, UnprepareOutcome
from wit_world.imports.common import KeyValue, Problem, ProblemKind
from wit_world.imports.container_edits import ContainerEdits, DeviceNode, NodeAccess
from wit_world.imports.inventory import Attribute, AttributeValue_Int, Device, Inventory, Pool

POOL = "nodes"
# Path of the node by the name of its device.
NODES = {"fuse": "/dev/fuse", "net-tun": "/dev/net/tun"}


class Identity(exports.Identity):
    def describe(self):
        capabilities = Capabilities(
            sysfs_read=[], sysfs_write=[], host_files=[], pci_driver=[], device_nodes=list(NODES.values()),
            mounts=[], hooks=[], env=["MY_GPU_*"], net_devices=[],
        )
        return DriverInfo(
            name="my-gpu.example.com", version="0.1.0", summary="Nodes below /dev", capabilities=capabilities,
            limits=Limits(memory_mib=None, wall_ms=None, cpu_ms=None, concurrent_calls=None),
            event_subsystems=["misc"], discovery_period_seconds=None, annotations=[],
        )


class Discovery(exports.Discovery):
    def discover(self, ctx, trigger):
        # A node that this machine does not have is not an error.
        devices = [device(name, node) for name, path in NODES.items() for node in device_nodes.glob(path)]
        return Inventory([Pool(POOL, devices, shared_counters=[], extended_resource=None, annotations=[])])


class Preparation(exports.Preparation):
    def prepare(self, ctx, claims):
        return [PrepareOutcome(claim.id.uid, outcome(prepare, claim)) for claim in claims]

    def unprepare(self, ctx, claims):
        # Nothing of a claim is left on the node.
        return [UnprepareOutcome(record.claim.id.uid, Ok(None)) for record in claims]


def outcome(function, argument):
    """Returns an outcome for each claim: a raised problem is the outcome of its claim only."""
    try:
        return Ok(function(argument))
    except Err as problem:
        return problem


def device(name, node):
    return Device(
        name, attributes=[Attribute("minor", AttributeValue_Int(node.minor))], capacities=[], taints=[], consumes=[],
        allow_multiple_allocations=False, identity=["dev:" + node.path], numa_nodes=[], annotations=[],
    )


def prepare(claim):
    devices = [prepare_device(allocated) for allocated in claim.devices]
    return PreparedClaim(devices, edits([], []), annotations=[], memo=b"")


def prepare_device(allocated):
    path = NODES.get(allocated.device)
    if path is None:
        raise Err(Problem(ProblemKind.NOT_FOUND, "no-such-device", allocated.device, retry_after_ms=None, details=[]))
    # Raises the host's problem for a node that is gone.
    device_nodes.stat(path)
    node = DeviceNode(
        path, host_path=None, kind=None, major=None, minor=None, access=NodeAccess.READ | NodeAccess.WRITE,
        file_mode=None, uid=None, gid=None,
    )
    variable = "MY_GPU_" + allocated.device.replace("-", "_").upper()
    return PreparedDevice(
        # Without the subrequest of a prioritised list.
        requests=[allocated.request.split("/")[0]], pool=allocated.pool, device=allocated.device,
        share_id=allocated.share_id, edits=edits([KeyValue(variable, path)], [node]), status=None,
    )


def edits(env, nodes):
    return ContainerEdits(
        env, device_nodes=nodes, mounts=[], net_devices=[], hooks=[], additional_gids=[], intel_rdt=None
    )
