"""Two slots as devices: the example driver of Nodedock in Python.

Every call comes into a fresh instance of this program, in the state in which `componentize-py` left it after importing this module.
Nothing that is kept in a variable is there at the next call: what has to last goes into the memo of a claim.
"""

import json

from componentize_py_types import Err, Ok
from wit_world import exports
from wit_world.exports.identity import Capabilities, DriverInfo, Limits
from wit_world.imports import ledger, log, sysfs
from wit_world.imports.log import Level
from wit_world.imports.types import (
    Attribute,
    AttributeValue_Boolean,
    AttributeValue_Int,
    AttributeValue_Text,
    AttributeValue_Version,
    Device,
    Edits,
    Inventory,
    Pool,
    PreparedClaim,
    PreparedDevice,
    PrepareOutcome,
    Problem,
    ProblemKind,
    UnprepareOutcome,
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
                device_nodes=[],
                mounts=[],
                hooks=[],
                env=["GOLDEN_*"],
                net_devices=[],
            ),
            limits=Limits(memory_mib=None, wall_ms=None, cpu_ms=None),
            event_subsystems=[],
            discovery_period_seconds=None,
            annotations=[("language", "python")],
        )


class Discovery(exports.Discovery):
    def discover(self, ctx, trigger):
        # What is not granted or not there is raised as the problem that the host answered, and is the answer of this call.
        cpus = sysfs.read(CPUS)
        log.write(Level.INFO, "discovered", [("devices", str(len(SLOTS))), ("claims", str(len(ledger.claims())))])
        devices = [slot(index, name, cpus) for index, name in enumerate(SLOTS)]
        return Inventory([Pool(POOL, devices, shared_counters=[], extended_resource=None, annotations=[])])


class Preparation(exports.Preparation):
    def prepare(self, ctx, claims):
        return [PrepareOutcome(claim.id.uid, outcome(prepare, claim)) for claim in claims]

    def unprepare(self, ctx, claims):
        return [UnprepareOutcome(live.claim.id.uid, outcome(unprepare, live)) for live in claims]


def outcome(function, argument):
    """A problem that is raised for one claim is that claim's outcome, and the others get theirs."""
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
    before = ledger.get(claim.id.uid)
    if before is not None and before.memo != memo:
        raise invalid("prepared-otherwise", "the claim is prepared with other devices or modes")
    log.write(Level.INFO, "prepared", [("claim", claim.id.name)])
    return PreparedClaim([ready(*choice) for choice in chosen], edits([]), annotations=[], memo=memo)


def mode_of(claim, allocated):
    """What the last of the configs for this device says: those of the claim come after those of its class."""
    if allocated.pool != POOL or allocated.device not in SLOTS:
        raise Err(problem(ProblemKind.NOT_FOUND, "no-such-device", f"there is no {allocated.pool}/{allocated.device}"))
    asked = {allocated.request, base_request(allocated)}
    configs = [config for config in claim.configs if not config.requests or asked & set(config.requests)]
    mode = mode_in(configs[-1].parameters) if configs else MODES[0]
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
        edits=edits([("GOLDEN_" + allocated.device.upper().replace("-", "_"), mode)]),
        status=None,
    )


def base_request(allocated):
    """The request without the subrequest of a prioritised list."""
    return allocated.request.split("/")[0]


def edits(env):
    return Edits(env, device_nodes=[], mounts=[], net_devices=[], hooks=[], additional_gids=[], intel_rdt=None)


def unprepare(live):
    # A claim whose prepare never came to its end has no memo, and nothing to give back.
    for line in live.memo.decode(errors="replace").splitlines():
        device, _, mode = line.partition(" ")
        if device not in SLOTS or mode not in MODES:
            raise Err(problem(ProblemKind.INTERNAL, "bad-memo", "the memo is not one that this driver writes"))
    log.write(Level.INFO, "given back", [("claim", live.claim.id.name)])


def problem(kind, code, message):
    return Problem(kind, code, message, retry_after_ms=None, details=[])


def invalid(code, message):
    """A refusal that is final: the host does not ask again until the claim is another."""
    return Err(problem(ProblemKind.INVALID, code, message))
