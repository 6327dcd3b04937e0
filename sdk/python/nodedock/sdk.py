"""Helpers for drivers: reads below /sys that tell an absence from a failure, problems, devices, and container edits.

They are thin: every function takes and returns what the bindings (`wit_world`) have, with the fields left out that a driver does not use.
"""

from componentize_py_types import Err, Ok
from wit_world.exports.identity import Capabilities, DriverInfo, Limits
from wit_world.imports import sysfs
from wit_world.imports.claims import PreparedClaim, PreparedDevice
from wit_world.imports.common import KeyValue, Problem, ProblemKind
from wit_world.imports.container_edits import ContainerEdits, DeviceNode, Mount, NodeAccess
from wit_world.imports.inventory import (
    Attribute,
    AttributeValue_Boolean,
    AttributeValue_Booleans,
    AttributeValue_Int,
    AttributeValue_Ints,
    AttributeValue_Text,
    AttributeValue_Texts,
    Device,
    Pool,
)

# Codes of links that are none: recorded machines have such.
NOT_LINKS = {"not-a-link", "outside-sysfs"}


def problem(kind, code, message, retry_after_ms=None, **details):
    """Returns a problem to raise. `kind` is a `ProblemKind`; `details` are texts."""
    pairs = [KeyValue(key, value) for key, value in details.items()]
    return Err(Problem(kind, code, message, retry_after_ms, pairs))


def invalid(code, message):
    """Returns a refusal: the host does not retry until the claim or the config changes."""
    return problem(ProblemKind.INVALID, code, message)


def not_found(code, message):
    """Returns the problem that something named in the request does not exist."""
    return problem(ProblemKind.NOT_FOUND, code, message)


def is_absent(error):
    """Returns whether a problem of a read is a fact about the node: nothing exists there, or the kernel has no value now."""
    return error.value.kind == ProblemKind.NOT_FOUND or error.value.code == "no-value"


def find(path):
    """Returns the content of a file below /sys, or None if it does not exist or has no value now.

    Raises every other problem: a read that failed says nothing about the node.
    """
    return present(sysfs.read, path)


def find_link(path):
    """Returns the target of a link below /sys, relative to /sys, or None if there is no link. Raises every other problem."""
    try:
        return present(sysfs.read_link, path)
    except Err as error:
        if error.value.code in NOT_LINKS:
            return None
        raise


def find_parsed(path, parse=int):
    """Returns the content of a file as `find` does, parsed, such as a number; None also for content that does not parse.

    `parse` raises ValueError for such content; `parse=hexadecimal` reads PCI identifiers.
    """
    text = find(path)
    try:
        return None if text is None else parse(text.strip())
    except ValueError:
        return None


def hexadecimal(text):
    """Parses `0x10de` and `10de`."""
    return int(text, 16)


def devices(pattern):
    """Returns the directories of devices that match a glob below /sys, such as `class/net/*`: links are followed, each once, sorted."""
    return sorted({find_link(path) or path for path in sysfs.glob(pattern)})


def present(read, path):
    try:
        return read(path)
    except Err as error:
        if is_absent(error):
            return None
        raise


def driver_info(name, version, summary="", event_subsystems=(), discovery_period_seconds=None, annotations=None, **requests):
    """Describes a driver. `requests` are capabilities (`device_nodes=[...]`) and limits (`memory_mib=128`)."""
    limits = {key: requests.pop(key, None) for key in Limits.__dataclass_fields__}
    unknown = requests.keys() - Capabilities.__dataclass_fields__.keys()
    if unknown:
        raise TypeError(f"the contract has no capabilities or limits {', '.join(sorted(unknown))}")
    capabilities = {key: list(requests.get(key, ())) for key in Capabilities.__dataclass_fields__}
    return DriverInfo(
        name, version, summary, Capabilities(**capabilities), Limits(**limits), list(event_subsystems),
        discovery_period_seconds, pairs(annotations),
    )


def device(name, attributes=None, identity=(), numa_nodes=(), allow_multiple_allocations=False, **more):
    """Describes a device. `attributes` have the values int, bool, text or lists of them; `more` are fields of the contract's device."""
    values = [Attribute(key, value_of(key, value)) for key, value in (attributes or {}).items()]
    fields = {"capacities": [], "taints": [], "consumes": [], "annotations": []} | more
    return Device(
        name, attributes=values, identity=list(identity), numa_nodes=list(numa_nodes),
        allow_multiple_allocations=allow_multiple_allocations, **fields,
    )


def pool(name, devices, shared_counters=(), extended_resource=None, annotations=None):
    """Describes a pool of devices."""
    return Pool(name, list(devices), list(shared_counters), extended_resource, pairs(annotations))


def value_of(name, value):
    """Returns the value of an attribute; one of the contract itself is returned as it is, such as `AttributeValue_Version`."""
    kinds = {bool: (AttributeValue_Boolean, AttributeValue_Booleans), int: (AttributeValue_Int, AttributeValue_Ints),
             str: (AttributeValue_Text, AttributeValue_Texts)}
    if type(value) in kinds:
        return kinds[type(value)][0](value)
    if type(value).__name__.startswith("AttributeValue_"):
        return value
    if isinstance(value, (list, tuple)) and value and type(value[0]) in kinds and len({type(item) for item in value}) == 1:
        return kinds[type(value[0])][1](list(value))
    raise TypeError(f"attribute {name} has the value {value!r}, which is no int, bool, str or list of one of them")


def edits(env=None, nodes=(), mounts=(), net_devices=(), hooks=(), additional_gids=(), intel_rdt=None):
    """Returns container edits. `env` are texts by name; `nodes` and `mounts` are paths, or `device_node(...)` and `mount(...)`."""
    nodes = [device_node(node) if isinstance(node, str) else node for node in nodes]
    mounts = [mount(path) if isinstance(path, str) else path for path in mounts]
    return ContainerEdits(
        pairs(env), nodes, mounts, list(net_devices), list(hooks), list(additional_gids), intel_rdt
    )


def device_node(path, access=NodeAccess.READ | NodeAccess.WRITE, **more):
    """Returns a node for a container, at the same path. `more` are fields of the contract's device node, such as `host_path`."""
    fields = {"host_path": None, "kind": None, "major": None, "minor": None, "file_mode": None, "uid": None, "gid": None}
    return DeviceNode(path, access=access, **(fields | more))


def mount(host_path, container_path=None, options=("ro", "nosuid", "nodev", "bind"), fs_type=None):
    """Returns a mount for a container, at the same path if there is no other, and read-only."""
    return Mount(host_path, container_path or host_path, list(options), fs_type)


def prepared(allocated, device_edits, status=None):
    """Returns a prepared device for one of a claim."""
    # Without the subrequest of a prioritised list.
    request = allocated.request.split("/")[0]
    return PreparedDevice([request], allocated.pool, allocated.device, allocated.share_id, device_edits, status)


def prepared_claim(prepared_devices, claim_edits=None, annotations=None, memo=b""):
    """Returns a prepared claim. `memo` are bytes that the driver gets back."""
    return PreparedClaim(list(prepared_devices), claim_edits or edits(), pairs(annotations), memo)


def outcome(function, *arguments):
    """Returns the outcome of one claim: a problem that the function raises is that of this claim only."""
    try:
        return Ok(function(*arguments))
    except Err as error:
        return error


def pairs(texts):
    return [KeyValue(key, value) for key, value in (texts or {}).items()]
