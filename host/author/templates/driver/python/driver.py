"""Offers nodes below /dev as devices.

Every call runs in a fresh instance of this program, in the state that `componentize-py` recorded after it imported this module.
Variables do not keep their value until the next call: state that must persist goes into the memo of a claim.
"""

from componentize_py_types import Ok
from nodedock import sdk
from wit_world import exports
from wit_world.imports import device_nodes
from wit_world.imports.claims import PrepareOutcome, UnprepareOutcome
from wit_world.imports.inventory import Inventory
@FACETS@
POOL = "nodes"
# Path of the node by the name of its device.
NODES = {"fuse": "/dev/fuse", "net-tun": "/dev/net/tun"}


class Identity(exports.Identity):
    def describe(self):
        return sdk.driver_info(
            "my-gpu.example.com", "0.1.0", "Nodes below /dev", event_subsystems=["misc"],
            device_nodes=NODES.values(), env=["MY_GPU_*"],
        )


class Discovery(exports.Discovery):
    def discover(self, ctx, trigger):
        # A node that this machine does not have is not an error.
        found = [(name, node) for name, path in NODES.items() for node in device_nodes.glob(path)]
        devices = [sdk.device(name, {"minor": node.minor}, identity=["dev:" + node.path]) for name, node in found]
        return Inventory([sdk.pool(POOL, devices)])


class Preparation(exports.Preparation):
    def prepare(self, ctx, claims):
        return [PrepareOutcome(claim.id.uid, sdk.outcome(prepare, claim)) for claim in claims]

    def unprepare(self, ctx, claims):
        # Nothing of a claim is left on the node.
        return [UnprepareOutcome(record.claim.id.uid, Ok(None)) for record in claims]


def prepare(claim):
    return sdk.prepared_claim(prepare_device(allocated) for allocated in claim.devices)


def prepare_device(allocated):
    path = NODES.get(allocated.device)
    if path is None:
        raise sdk.not_found("no-such-device", f"there is no device {allocated.device}")
    # Raises the host's problem for a node that is gone.
    device_nodes.stat(path)
    variable = "MY_GPU_" + allocated.device.replace("-", "_").upper()
    return sdk.prepared(allocated, sdk.edits({variable: path}, [path]))
