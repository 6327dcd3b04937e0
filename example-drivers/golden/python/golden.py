"""Two slots as devices: the example driver of Nodedock in Python.

Every call runs in a fresh instance of this program, in the state that `componentize-py` recorded after it imported this module.
Variables do not keep their value until the next call: state that must persist goes into the memo of a claim.
"""

import json

from componentize_py_types import Err, Ok
from wit_world import exports
from wit_world.exports.identity import Capabilities, DriverInfo, Limits
from wit_world.imports import log, prepared_claims, sysfs
from wit_world.imports.log import Level
from wit_world.imports.claims import PreparedClaim, PreparedDevice, PrepareOutcome, UnprepareOutcome
from wit_world.imports.common import KeyValue, Problem, ProblemKind
from wit_world.imports.container_edits import ContainerEdits
from wit_world.imports.inventory import (
    Attribute,
    AttributeValue_Boolean,
    AttributeValue_Int,
    AttributeValue_Text,
    AttributeValue_Version,
    Device,
    Inventory,
    Pool,
)

POOL = "slots"
SLOTS = ["slot-0", "slot-1"]
MODES = ["normal", "quiet"]
CPUS = "devices/system/cpu/online"


class Identity(exports.Identity):
    def describe(self):
        return DriverInfo(
            name="golden.nodedock.dev",
            version="0.1.0",
            summary="Two slots, the same driver in every language",
            capabilities=Capabilities(
                sysfs_read=[CPUS],
                sysfs_write=[],
                host_files=[],
                pci_driver=[],
                device_nodes=[],
                mounts=[],
                hooks=[],
                env=["GOLDEN_*"],
                net_devices=[],
            ),
            limits=Limits(memory_mib=None, wall_ms=None, cpu_ms=None, concurrent_calls=None),
            event_subsystems=[],
            discovery_period_seconds=None,
            annotations=[KeyValue("language", "python")],
        )


class Discovery(exports.Discovery):
    def discover(self, ctx, trigger):
        # For a file that is not granted or does not exist the host raises its problem, which is the result of this call.
        cpus = sysfs.read(CPUS)
        say("discovered", devices=str(len(SLOTS)), claims=str(count_prepared()))
        devices = [slot(index, name, cpus) for index, name in enumerate(SLOTS)]
        return Inventory([Pool(POOL, devices, shared_counters=[], extended_resource=None, annotations=[])])


class Preparation(exports.Preparation):
    def prepare(self, ctx, claims):
        return [PrepareOutcome(claim.id.uid, outcome(prepare, claim)) for claim in claims]

    def unprepare(self, ctx, claims):
        return [UnprepareOutcome(record.claim.id.uid, outcome(unprepare, record)) for record in claims]


def say(message, **fields):
    log.write(Level.INFO, message, [KeyValue(key, value) for key, value in fields.items()])


def count_prepared():
    """Counts the prepared claims over all pages."""
    page = prepared_claims.all(None)
    count = len(page.claims)
    while page.next is not None:
        page = prepared_claims.all(page.next)
        count += len(page.claims)
    return count


def outcome(function, argument):
    """Returns an outcome for each claim: a raised problem is the outcome of its claim only."""
    try:
        return Ok(function(argument))
    except Err as problem:
        return problem


def slot(index, name, cpus):
    return Device(
        name,
        attributes=[
            Attribute("index", AttributeValue_Int(index)),
            Attribute("model", AttributeValue_Text("Golden Slot")),
            Attribute("firmware", AttributeValue_Version("1.2.0")),
            Attribute("spare", AttributeValue_Boolean(index > 0)),
            Attribute("cpus", AttributeValue_Text(cpus)),
        ],
        capacities=[],
        taints=[],
        consumes=[],
        allow_multiple_allocations=True,
        identity=[],
        numa_nodes=[],
        annotations=[],
    )


def prepare(claim):
    chosen = [(allocated, mode_of(claim, allocated)) for allocated in claim.devices]
    memo = "".join(f"{allocated.device} {mode}\n" for allocated, mode in chosen).encode()
    before = prepared_claims.get(claim.id.uid)
    if before is not None and before.prepared and before.memo != memo:
        raise invalid("prepared-otherwise", "the claim is prepared with other devices or modes")
    say("prepared", claim=claim.id.name)
    return PreparedClaim([ready(*choice) for choice in chosen], edits([]), annotations=[], memo=memo)


def mode_of(claim, allocated):
    """Returns the mode of the last parameters for this device: those of the claim come after those of its class."""
    if allocated.pool != POOL or allocated.device not in SLOTS:
        raise Err(problem(ProblemKind.NOT_FOUND, "no-such-device", f"there is no {allocated.pool}/{allocated.device}"))
    requests = {allocated.request, base_request(allocated)}
    entries = [entry for entry in claim.parameters if not entry.requests or requests & set(entry.requests)]
    mode = mode_in(entries[-1].parameters) if entries else MODES[0]
    if mode not in MODES:
        raise invalid("no-such-mode", f'mode "{mode}" is not one of normal, quiet')
    return mode


def mode_in(parameters):
    bad = invalid("bad-parameters", "the parameters are not an object with nothing but a text \"mode\"")
    try:
        found = json.loads(parameters)
    except ValueError:
        raise bad
    if not isinstance(found, dict) or found.keys() - {"mode"}:
        raise bad
    mode = found.get("mode", MODES[0])
    if not isinstance(mode, str):
        raise bad
    return mode


def ready(allocated, mode):
    return PreparedDevice(
        requests=[base_request(allocated)],
        pool=allocated.pool,
        device=allocated.device,
        share_id=allocated.share_id,
        edits=edits([KeyValue("GOLDEN_" + allocated.device.upper().replace("-", "_"), mode)]),
        status=None,
    )


def base_request(allocated):
    """Returns the request without the subrequest of a prioritised list."""
    return allocated.request.split("/")[0]


def edits(env):
    return ContainerEdits(env, device_nodes=[], mounts=[], net_devices=[], hooks=[], additional_gids=[], intel_rdt=None)


def unprepare(record):
    # A claim whose prepare did not complete has no memo and nothing to unprepare.
    for line in record.memo.decode(errors="replace").splitlines():
        device, _, mode = line.partition(" ")
        if device not in SLOTS or mode not in MODES:
            raise Err(problem(ProblemKind.INTERNAL, "bad-memo", "the memo is not one that this driver writes"))
    say("unprepared", claim=record.claim.id.name)


def problem(kind, code, message):
    return Problem(kind, code, message, retry_after_ms=None, details=[])


def invalid(code, message):
    """Returns a permanent refusal: the host does not retry until the claim changes."""
    return Err(problem(ProblemKind.INVALID, code, message))
