//! The bounds of every accepted answer, checked on the model and not by the code that converts.

use std::path::Path;

use nodedock_model::limit::*;
use nodedock_model::rule::is_unprintable;
use nodedock_model::{
    AttributeValue, CounterSet, Device, DeviceAccess, DeviceNode, DeviceStatus, Edits,
    HealthReport, Hook, Inventory, Mount, PreparedClaim, Problem,
};
use nodedock_wasm::DriverInfo;

fn at_most(what: &str, count: usize, max: usize) {
    assert!(count <= max, "{count} {what}, and {max} are allowed");
}

fn line(what: &str, text: &str, max: usize) {
    at_most(what, text.len(), max);
    assert!(
        !text.contains(is_unprintable),
        "{what}: {text:?} is no line"
    );
}

fn labels<'a>(what: &str, labels: impl ExactSizeIterator<Item = (&'a String, &'a String)>) {
    at_most(what, labels.len(), LABELS_MAX);
    for (key, value) in labels {
        line("bytes of a key", key, LABEL_KEY_BYTES_MAX);
        at_most("bytes of a value", value.len(), LABEL_VALUE_BYTES_MAX);
    }
}

pub(super) fn description(info: &DriverInfo) {
    line("bytes of the summary", &info.summary, SUMMARY_BYTES_MAX);
    semver::Version::parse(&info.version).expect("the version is one");
    at_most(
        "event subsystems",
        info.event_subsystems.len(),
        EVENT_SUBSYSTEMS_MAX,
    );
    assert!((DISCOVERY_PERIOD_MIN..=DISCOVERY_PERIOD_MAX).contains(&info.discovery_period));
    labels("annotations", info.annotations.iter());
    let requested = &info.capabilities;
    let lists = [
        &requested.sysfs_read,
        &requested.device_nodes,
        &requested.mounts,
        &requested.hooks,
        &requested.env,
        &requested.net_devices,
    ];
    for list in lists {
        at_most("globs", list.len(), GRANT_ENTRIES_MAX);
        list.iter()
            .for_each(|glob| line("bytes of a glob", glob, GRANT_ENTRY_BYTES_MAX));
    }
    at_most("writes", requested.sysfs_write.len(), GRANT_ENTRIES_MAX);
}

pub(super) fn inventory(inventory: &Inventory) {
    at_most("pools", inventory.pools.len(), POOLS_MAX);
    at_most("devices", inventory.device_count(), DEVICES_MAX);
    for pool in inventory.pools.values() {
        counter_sets(&pool.shared_counters, COUNTER_SETS_MAX);
        labels("annotations", pool.annotations.iter());
        pool.devices.values().for_each(device);
    }
}

fn device(device: &Device) {
    at_most(
        "attributes",
        device.attributes.len() + device.capacities.len(),
        ATTRIBUTES_MAX,
    );
    at_most(
        "values",
        device.attributes.values().map(attribute).sum(),
        ATTRIBUTE_VALUES_MAX,
    );
    at_most("taints", device.taints.len(), TAINTS_MAX);
    at_most("identities", device.identity.len(), IDENTITIES_MAX);
    at_most("NUMA nodes", device.numa_nodes.len(), NUMA_NODES_MAX);
    device
        .identity
        .iter()
        .for_each(|identity| line("bytes of an identity", identity, IDENTITY_BYTES_MAX));
    device
        .capacities
        .values()
        .for_each(|capacity| quantity(&capacity.value));
    counter_sets(&device.consumes, CONSUMED_SETS_MAX);
    labels("annotations", device.annotations.iter());
}

/// Returns how many values it has.
fn attribute(value: &AttributeValue) -> usize {
    let texts = match value {
        AttributeValue::Int(_) | AttributeValue::Bool(_) => return 1,
        AttributeValue::Ints(list) => return list.len(),
        AttributeValue::Bools(list) => return list.len(),
        AttributeValue::Text(one) => vec![one.to_string()],
        AttributeValue::Version(version) => vec![version.to_string()],
        AttributeValue::Texts(list) => list.iter().map(ToString::to_string).collect(),
        AttributeValue::Versions(list) => list.iter().map(ToString::to_string).collect(),
    };
    texts
        .iter()
        .for_each(|text| line("bytes of a text", text, ATTRIBUTE_TEXT_MAX));
    texts.len()
}

fn quantity(text: &str) {
    line("bytes of a quantity", text, QUANTITY_BYTES_MAX);
    assert!(
        text.contains(|c: char| c.is_ascii_digit()) && !text.starts_with('-'),
        "{text:?} is no quantity"
    );
}

fn counter_sets(sets: &[CounterSet], max: usize) {
    at_most("counter sets", sets.len(), max);
    for set in sets {
        at_most("counters", set.counters.len(), COUNTERS_MAX);
        set.counters.values().for_each(|value| quantity(value));
    }
}

pub(super) fn health(report: &HealthReport) {
    at_most("devices", report.len(), DEVICES_MAX);
    report.values().for_each(|health| {
        line(
            "bytes of a message",
            &health.message,
            HEALTH_MESSAGE_BYTES_MAX,
        )
    });
}

pub(super) fn problem(problem: &Problem) {
    assert!(!problem.code.is_empty() && !problem.message.is_empty());
    line("bytes of a code", &problem.code, PROBLEM_CODE_BYTES_MAX);
    line(
        "bytes of a message",
        &problem.message,
        PROBLEM_MESSAGE_BYTES_MAX,
    );
    labels(
        "details",
        problem.details.iter().map(|(key, value)| (key, value)),
    );
}

pub(super) fn prepared(claim: &PreparedClaim) {
    at_most("devices", claim.devices.len(), ALLOCATED_DEVICES_MAX);
    at_most("bytes of memo", claim.memo.len(), MEMO_BYTES_MAX);
    labels("annotations", claim.annotations.iter());
    all_edits(claim).for_each(edits);
    for device in &claim.devices {
        at_most("requests", device.requests.len(), ALLOCATED_DEVICES_MAX);
        device.status.iter().for_each(status);
    }
}

fn all_edits(claim: &PreparedClaim) -> impl Iterator<Item = &Edits> {
    let of_devices = claim.devices.iter().map(|device| match &device.access {
        DeviceAccess::Edits(edits) => edits,
        DeviceAccess::CdiDevices(names) | DeviceAccess::EditsAndCdiDevices(_, names) => {
            panic!("a guest names no CDI devices: {names:?}")
        }
        DeviceAccess::Plugin(answer) => panic!("a guest is no device plugin: {answer:?}"),
    });
    std::iter::once(&claim.edits).chain(of_devices)
}

fn edits(edits: &Edits) {
    let counts = [
        edits.env.len(),
        edits.device_nodes.len(),
        edits.mounts.len(),
        edits.net_devices.len(),
        edits.hooks.len(),
        edits.additional_gids.len(),
    ];
    counts
        .into_iter()
        .for_each(|count| at_most("edits of one kind", count, EDITS_MAX));
    env(&edits.env);
    edits.device_nodes.iter().for_each(device_node);
    edits.mounts.iter().for_each(mount);
    edits.hooks.iter().for_each(hook);
    edits
        .intel_rdt
        .iter()
        .for_each(|rdt| at_most("schemata", rdt.schemata.len(), EDITS_MAX));
}

fn env(variables: &[(String, String)]) {
    for (name, value) in variables {
        line("bytes of a variable's name", name, ENV_NAME_BYTES_MAX);
        line("bytes of a variable's value", value, ENV_VALUE_BYTES_MAX);
        assert!(
            !name.is_empty() && !name.contains('='),
            "{name:?} names no variable"
        );
    }
}

fn path(text: &str) {
    use std::path::Component::{Normal, RootDir};
    line("bytes of a path", text, PATH_BYTES_MAX);
    let plain = Path::new(text)
        .components()
        .all(|part| matches!(part, RootDir | Normal(_)));
    assert!(plain && text.starts_with('/'), "{text:?} is no plain path");
}

fn device_node(node: &DeviceNode) {
    path(&node.path);
    path(node.node_path());
    assert!(!node.permissions.is_empty() && node.permissions.chars().all(|c| "rwm".contains(c)));
    assert!(node.file_mode.is_none_or(|mode| mode <= 0o777), "{node:?}");
}

fn mount(mount: &Mount) {
    path(&mount.host_path);
    path(&mount.container_path);
    // One more: the check of the node adds that it is a bind mount.
    at_most("options", mount.options.len(), EDITS_MAX + 1);
}

fn hook(hook: &Hook) {
    path(&hook.path);
    at_most("arguments", hook.args.len(), EDITS_MAX);
    hook.args
        .iter()
        .for_each(|argument| line("bytes of an argument", argument, ENV_VALUE_BYTES_MAX));
    env(&hook.env);
}

fn status(status: &DeviceStatus) {
    at_most("conditions", status.conditions.len(), STATUS_CONDITIONS_MAX);
    if let Some(data) = &status.data {
        at_most("bytes of data", data.len(), STATUS_DATA_BYTES_MAX);
    }
    status
        .network
        .iter()
        .for_each(|network| at_most("addresses", network.ips.len(), STATUS_IPS_MAX));
}

/// Edits that no grant of globs allows, however wide.
pub(super) fn verified(claim: &PreparedClaim) {
    prepared(claim);
    all_edits(claim).for_each(|edits| {
        let loading = ["LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "BASH_ENV"];
        assert!(
            edits
                .env
                .iter()
                .all(|(name, _)| !loading.contains(&name.as_str())),
            "{:?}",
            edits.env
        );
        assert!(!edits.additional_gids.contains(&0), "the group of root");
        edits.device_nodes.iter().for_each(verified_node);
        edits.mounts.iter().for_each(verified_mount);
        assert!(
            edits.hooks.iter().all(|hook| hook.path == "/usr/bin/env"),
            "{:?}",
            edits.hooks
        );
    });
}

fn verified_node(node: &DeviceNode) {
    let shown = node.node_path();
    assert!(
        shown.starts_with("/dev/") && node.kind.is_some(),
        "{node:?}"
    );
    for denied in ["/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/sda", "/dev/vda"] {
        assert_ne!(shown, denied);
    }
}

fn verified_mount(mount: &Mount) {
    assert!(
        mount
            .options
            .iter()
            .any(|option| matches!(option.as_str(), "bind" | "rbind")),
        "{mount:?}"
    );
    for option in ["suid", "dev", "exec", "shared", "rshared", "remount"] {
        assert!(
            !mount.options.iter().any(|given| given == option),
            "{mount:?}"
        );
    }
    let source = Path::new(&mount.host_path);
    for guarded in [
        "/etc",
        "/proc",
        "/sys",
        "/dev",
        "/run",
        "/root",
        "/tmp",
        "/var/run",
        "/var/lib/kubelet",
    ] {
        assert!(
            !source.starts_with(guarded) && !Path::new(guarded).starts_with(source),
            "{mount:?}"
        );
    }
}
