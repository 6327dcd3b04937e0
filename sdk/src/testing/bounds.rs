//! The bounds of the contract, as the host checks them. Each function returns the violations, one sentence each.
//!
//! ```
//! use nodedock_sdk::{Device, Inventory, Pool, testing::bounds};
//!
//! let inventory = Inventory::new().pool(Pool::new("misc").device(Device::new("fuse")));
//! assert!(bounds::inventory(&inventory).is_empty());
//! let twice = Inventory::new().pool(Pool::new("misc")).pool(Pool::new("misc"));
//! assert_eq!(bounds::inventory(&twice), ["pools: \"misc\" occurs twice"]);
//! ```

use std::collections::BTreeSet;
use std::fmt;

use nodedock_model::limit::{
    ALLOCATED_DEVICES_MAX, ATTRIBUTE_TEXT_MAX, ATTRIBUTE_VALUES_MAX, ATTRIBUTES_MAX,
    COMPATIBILITY_GROUPS_MAX, CONSUMED_SETS_MAX, COUNTER_SETS_MAX, COUNTERS_MAX, DEVICES_MAX,
    EDITS_MAX, ENV_VALUE_BYTES_MAX, IDENTITIES_MAX, IDENTITY_BYTES_MAX, LABEL_KEY_BYTES_MAX,
    LABEL_VALUE_BYTES_MAX, LABELS_MAX, MEMO_BYTES_MAX, NODE_ALLOCATABLE_MAX, POLICY_VALUES_MAX,
    POOLS_MAX, PROBLEM_MESSAGE_BYTES_MAX, STATUS_DATA_BYTES_MAX, SUMMARY_BYTES_MAX, TAINTS_MAX,
};
use nodedock_model::rule::{
    is_env_name, is_interface_name, is_plain_path, is_problem_code, is_quantity,
};
use nodedock_model::{
    BindingConditions, DeviceName, DriverName, ExtendedResource, PoolName, QualifiedName,
    is_dns_label, is_label_key, is_label_value,
};

use super::grant::requested;
use crate::{
    Additions, AttributeValue, CapacityChoice, ContainerEdits, CounterSet, Device, DeviceHealth,
    DriverInfo, Inventory, NodeAccess, Pool, Prepared, Problem,
};

/// Collects violations of the bounds with their location.
#[derive(Default)]
struct Report {
    lines: Vec<String>,
}

impl Report {
    fn demand(&mut self, holds: bool, line: impl FnOnce() -> String) {
        if !holds {
            self.lines.push(line());
        }
    }

    /// Demands a text that one of the host's types or rules accepts; the error is the line.
    fn parsed<T, E: fmt::Display>(&mut self, at: &str, parsed: Result<T, E>) {
        self.lines
            .extend(parsed.err().map(|error| format!("{at}: {error}")));
    }

    fn at_most(&mut self, what: &str, count: usize, most: usize) {
        self.demand(count <= most, || format!("{what}: {count}, at most {most}"));
    }

    fn unique<'a>(&mut self, what: &str, names: impl IntoIterator<Item = &'a str>) {
        let mut seen = BTreeSet::new();
        for name in names {
            self.demand(seen.insert(name), || {
                format!("{what}: {name:?} occurs twice")
            });
        }
    }

    fn quantity(&mut self, what: &str, value: &str) {
        self.demand(is_quantity(value), || {
            format!("{what}: {value:?} is not a quantity")
        });
    }

    fn labels(&mut self, what: &str, labels: &[(String, String)]) {
        self.at_most(what, labels.len(), LABELS_MAX);
        self.unique(what, labels.iter().map(|(key, _)| key.as_str()));
        for (key, value) in labels {
            self.demand((1..=LABEL_KEY_BYTES_MAX).contains(&key.len()), || {
                format!("{what}: key {key:?}")
            });
            self.at_most(
                &format!("{what}: bytes of {key}"),
                value.len(),
                LABEL_VALUE_BYTES_MAX,
            );
        }
    }

    fn path(&mut self, at: &str, path: &str) {
        self.demand(is_plain_path(path), || {
            format!("{at}: {path:?} is not an absolute, plain path")
        });
    }
}

/// Returns the violations of the bounds in a driver's description.
pub fn driver_info(info: &DriverInfo) -> Vec<String> {
    let mut report = Report::default();
    report.parsed("name", DriverName::new(&info.name));
    let begins_with_digit = info.name.starts_with(|c: char| c.is_ascii_digit());
    report.demand(!begins_with_digit, || {
        format!(
            "name: {:?} begins with a digit, and the vendor of a CDI device with a letter",
            info.name
        )
    });
    report.parsed("version", semver::Version::parse(&info.version));
    report.at_most("bytes of summary", info.summary.len(), SUMMARY_BYTES_MAX);
    report.parsed("capabilities", requested(&info.capabilities).check());
    report.labels("annotations", &info.annotations);
    report.lines
}

/// Returns the violations of the bounds in an inventory.
pub fn inventory(inventory: &Inventory) -> Vec<String> {
    let mut report = Report::default();
    report.at_most("pools", inventory.pools.len(), POOLS_MAX);
    report.at_most(
        "devices",
        inventory.pools.iter().map(|pool| pool.devices.len()).sum(),
        DEVICES_MAX,
    );
    report.unique(
        "pools",
        inventory.pools.iter().map(|pool| pool.name.as_str()),
    );
    inventory
        .pools
        .iter()
        .for_each(|pool| check_pool(&mut report, pool));
    report.lines
}

fn check_pool(report: &mut Report, pool: &Pool) {
    let at = format!("pool {}", pool.name);
    report.parsed(&at, PoolName::new(&pool.name));
    report.unique(
        &format!("devices of {at}"),
        pool.devices.iter().map(|device| device.name.as_str()),
    );
    check_counters(report, &at, &pool.shared_counters, COUNTER_SETS_MAX);
    report.labels(&format!("annotations of {at}"), &pool.annotations);
    if let Some(resource) = &pool.extended_resource {
        report.parsed(&at, ExtendedResource::new(resource));
    }
    for device in &pool.devices {
        check_device(report, pool, device);
    }
}

fn check_device(report: &mut Report, pool: &Pool, device: &Device) {
    let at = format!("device {}/{}", pool.name, device.name);
    report.parsed(&at, DeviceName::new(&device.name));
    let facts = device.attributes.len() + device.capacities.len();
    report.at_most(
        &format!("{at}: attributes and capacities"),
        facts,
        ATTRIBUTES_MAX,
    );
    let names = device
        .attributes
        .iter()
        .map(|attribute| attribute.name.as_str());
    report.unique(&format!("{at}: attributes"), names);
    let names = device
        .capacities
        .iter()
        .map(|capacity| capacity.name.as_str());
    report.unique(&format!("{at}: capacities"), names);
    let mut values = 0;
    for attribute in &device.attributes {
        report.parsed(&at, QualifiedName::new(&attribute.name));
        values += check_value(
            report,
            &format!("{at}: {}", attribute.name),
            &attribute.value,
        );
    }
    report.at_most(
        &format!("{at}: attribute values"),
        values,
        ATTRIBUTE_VALUES_MAX,
    );
    check_capacities(report, &at, device);
    report.at_most(&format!("{at}: taints"), device.taints.len(), TAINTS_MAX);
    for taint in &device.taints {
        let fits = is_label_key(&taint.key) && is_label_value(&taint.value);
        report.demand(fits, || {
            format!("{at}: taint {}={}", taint.key, taint.value)
        });
    }
    report.at_most(
        &format!("{at}: identities"),
        device.identity.len(),
        IDENTITIES_MAX,
    );
    for identity in &device.identity {
        report.demand((1..=IDENTITY_BYTES_MAX).contains(&identity.len()), || {
            format!("{at}: identity {identity:?}")
        });
    }
    check_counters(report, &at, &device.consumes, CONSUMED_SETS_MAX);
    for set in &device.consumes {
        let shared = pool
            .shared_counters
            .iter()
            .any(|shared| shared.name == set.name);
        report.demand(shared, || {
            format!("{at}: the pool has no counters {:?}", set.name)
        });
    }
    report.labels(&format!("{at}: annotations"), &device.annotations);
}

/// Returns the number of values.
fn check_value(report: &mut Report, at: &str, value: &AttributeValue) -> usize {
    let (texts, versions): (&[String], &[String]) = match value {
        AttributeValue::Text(text) => (std::slice::from_ref(text), &[]),
        AttributeValue::Texts(texts) => (texts, &[]),
        AttributeValue::Version(version) => (&[], std::slice::from_ref(version)),
        AttributeValue::Versions(versions) => (&[], versions),
        _ => (&[], &[]),
    };
    for text in texts.iter().chain(versions) {
        report.at_most(&format!("{at}: bytes"), text.len(), ATTRIBUTE_TEXT_MAX);
    }
    for version in versions {
        report.parsed(
            &format!("{at}: version {version:?}"),
            semver::Version::parse(version),
        );
    }
    let count = match value {
        AttributeValue::Ints(list) => list.len(),
        AttributeValue::Bools(list) => list.len(),
        AttributeValue::Texts(list) | AttributeValue::Versions(list) => list.len(),
        _ => 1,
    };
    report.demand(count > 0, || format!("{at}: the list is empty"));
    count
}

fn check_capacities(report: &mut Report, at: &str, device: &Device) {
    for capacity in &device.capacities {
        report.parsed(at, QualifiedName::new(&capacity.name));
        let at = format!("{at}: {}", capacity.name);
        report.quantity(&at, &capacity.value);
        let Some(policy) = &capacity.policy else {
            continue;
        };
        report.demand(device.allow_multiple_allocations, || {
            format!("{at}: a policy is only for devices that allow several allocations")
        });
        let amounts: Vec<&String> = match &policy.choice {
            CapacityChoice::Any => Vec::new(),
            CapacityChoice::Values(values) => values.iter().collect(),
            CapacityChoice::Range { min, max, step } => [Some(min), max.as_ref(), step.as_ref()]
                .into_iter()
                .flatten()
                .collect(),
        };
        report.at_most(
            &format!("{at}: values of the policy"),
            amounts.len(),
            POLICY_VALUES_MAX,
        );
        for amount in amounts.into_iter().chain(&policy.default_amount) {
            report.quantity(&at, amount);
        }
    }
}

fn check_counters(report: &mut Report, at: &str, sets: &[CounterSet], most: usize) {
    report.at_most(&format!("{at}: counter sets"), sets.len(), most);
    report.unique(
        &format!("{at}: counter sets"),
        sets.iter().map(|set| set.name.as_str()),
    );
    for set in sets {
        report.at_most(
            &format!("{at}: counters of {}", set.name),
            set.counters.len(),
            COUNTERS_MAX,
        );
        report.unique(
            &format!("{at}: counters"),
            set.counters.iter().map(|counter| counter.name.as_str()),
        );
        let names = set
            .counters
            .iter()
            .map(|counter| &counter.name)
            .chain([&set.name]);
        for name in names {
            report.demand(is_dns_label(name), || {
                format!("{at}: counters: {name:?} is not a DNS label")
            });
        }
        for counter in &set.counters {
            report.quantity(&format!("{at}: counter {}", counter.name), &counter.value);
        }
    }
}

/// Returns the violations of the bounds in the result of a prepare.
pub fn prepared(prepared: &Prepared) -> Vec<String> {
    let mut report = Report::default();
    report.at_most("devices", prepared.devices.len(), ALLOCATED_DEVICES_MAX);
    report.at_most("bytes of memo", prepared.memo.len(), MEMO_BYTES_MAX);
    report.labels("annotations", &prepared.annotations);
    for (key, _) in &prepared.annotations {
        report.demand(is_label_key(key), || {
            format!("{key:?} is not the name of an annotation")
        });
        report.demand(!key.starts_with("cdi.k8s.io/"), || {
            format!("annotation {key:?}: devices are injected by edits only")
        });
    }
    check_edits(&mut report, "edits", &prepared.edits);
    for device in &prepared.devices {
        let at = format!("device {}/{}", device.pool, device.device);
        let base = !device.requests.is_empty()
            && !device.requests.iter().any(|request| request.contains('/'));
        report.demand(base, || {
            format!("{at}: requests {:?} are not base requests", device.requests)
        });
        check_edits(&mut report, &at, &device.edits);
        if let Some(data) = device
            .status
            .as_ref()
            .and_then(|status| status.data.as_ref())
        {
            report.at_most(
                &format!("{at}: bytes of data"),
                data.len(),
                STATUS_DATA_BYTES_MAX,
            );
            let object = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(data);
            report.parsed(&format!("{at}: data is not a JSON object"), object);
        }
    }
    report.lines
}

fn check_edits(report: &mut Report, at: &str, edits: &ContainerEdits) {
    let lists = [
        ("env", edits.env.len()),
        ("device nodes", edits.device_nodes.len()),
        ("mounts", edits.mounts.len()),
        ("net devices", edits.net_devices.len()),
        ("hooks", edits.hooks.len()),
        ("additional gids", edits.additional_gids.len()),
    ];
    for (list, entries) in lists {
        report.at_most(&format!("{at}: {list}"), entries, EDITS_MAX);
    }
    report.unique(
        &format!("{at}: env"),
        edits.env.iter().map(|(name, _)| name.as_str()),
    );
    for (name, value) in &edits.env {
        report.demand(is_env_name(name), || format!("{at}: env {name:?}"));
        report.at_most(
            &format!("{at}: bytes of {name}"),
            value.len(),
            ENV_VALUE_BYTES_MAX,
        );
    }
    for node in &edits.device_nodes {
        report.path(at, &node.path);
        node.host_path.iter().for_each(|path| report.path(at, path));
        report.demand(node.access != NodeAccess::default(), || {
            format!("{at}: {} without any right", node.path)
        });
    }
    for mount in &edits.mounts {
        report.path(at, &mount.host_path);
        report.path(at, &mount.container_path);
    }
    for device in &edits.net_devices {
        for name in [&device.host_interface, &device.container_interface] {
            report.demand(is_interface_name(name), || {
                format!("{at}: interface {name:?}")
            });
        }
    }
    edits
        .hooks
        .iter()
        .for_each(|hook| report.path(at, &hook.path));
}

/// Returns the violations of the bounds in additions to an inventory.
pub fn additions(inventory: &Inventory, additions: &Additions) -> Vec<String> {
    let mut report = Report::default();
    let keys: Vec<String> = additions
        .devices
        .iter()
        .map(|added| format!("{}/{}", added.pool, added.device))
        .collect();
    report.unique("devices", keys.iter().map(String::as_str));
    report.unique(
        "pools",
        additions.pools.iter().map(|added| added.pool.as_str()),
    );
    for (added, key) in additions.devices.iter().zip(&keys) {
        let Some(device) = inventory.device(&added.pool, &added.device) else {
            report.demand(false, || format!("device {key} is not in the inventory"));
            continue;
        };
        let binding = BindingConditions {
            conditions: added.binding_conditions.clone(),
            failures: added.binding_failure_conditions.clone(),
        };
        if let Err(error) = binding.check() {
            report.demand(false, || format!("{key}: {error}"));
        }
        report.at_most(
            &format!("{key}: node allocatable"),
            added.node_allocatable.len(),
            NODE_ALLOCATABLE_MAX,
        );
        for compatibility in &added.compatibility {
            let set = &compatibility.counter_set;
            let is_consumed = device.consumes.iter().any(|consumed| consumed.name == *set);
            report.demand(is_consumed, || {
                format!("{key}: it does not consume counter set {set:?}")
            });
            report.at_most(
                &format!("{key}: groups of {set}"),
                compatibility.groups.len(),
                COMPATIBILITY_GROUPS_MAX,
            );
        }
    }
    for added in &additions.pools {
        let is_known = inventory.pools.iter().any(|pool| pool.name == added.pool);
        report.demand(is_known, || {
            format!("pool {} is not in the inventory", added.pool)
        });
        let skip = added.skip_node_operations;
        report.demand(skip.unprepare || !skip.prepare, || {
            format!(
                "pool {}: prepare is left out only together with unprepare",
                added.pool
            )
        });
    }
    report.lines
}

/// Returns the violations of the bounds in a problem.
pub fn problem(problem: &Problem) -> Vec<String> {
    let mut report = Report::default();
    report.demand(is_problem_code(&problem.code), || {
        format!(
            "code: {:?} is not lower-case words with dashes",
            problem.code
        )
    });
    report.demand(!problem.message.is_empty(), || "message: empty".to_owned());
    report.at_most(
        "bytes of message",
        problem.message.len(),
        PROBLEM_MESSAGE_BYTES_MAX,
    );
    report.labels("details", &problem.details);
    report.lines
}

/// Returns the violations of the bounds in a health result.
pub fn health(health: &[DeviceHealth]) -> Vec<String> {
    let mut report = Report::default();
    report.at_most("devices", health.len(), DEVICES_MAX);
    for device in health {
        let at = format!("bytes of message about {}/{}", device.pool, device.device);
        report.at_most(&at, device.message.len(), LABEL_VALUE_BYTES_MAX);
    }
    report.lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Capacity, CapacityPolicy, DeviceNode};

    fn lines(device: Device) -> Vec<String> {
        inventory(&Inventory::new().pool(Pool::new("p").device(device)))
    }

    #[test]
    fn a_proper_device_is_within_the_bounds() {
        let device = Device::new("gpu-0")
            .attribute("example.com/model", "Z")
            .attribute("v", AttributeValue::version("1.0.0"))
            .capacity("memory", "80Gi")
            .identity("pci:0000:3b:00.0");
        assert_eq!(lines(device), Vec::<String>::new());
    }

    #[test]
    fn names_that_kubernetes_would_refuse_are_beyond() {
        for name in ["GPU", "a_b", "", &"a".repeat(64)] {
            assert_eq!(lines(Device::new(name)).len(), 1, "{name}");
        }
        for name in ["0a", "a/b/c", "Example.com/a", &"a".repeat(33)] {
            assert_eq!(
                lines(Device::new("d").attribute(name, 1)).len(),
                1,
                "{name}"
            );
        }
    }

    #[test]
    fn values_are_held_to_their_kind_and_size() {
        assert_eq!(
            lines(Device::new("d").attribute("a", "x".repeat(65))).len(),
            1
        );
        assert_eq!(
            lines(Device::new("d").attribute("a", AttributeValue::version("1.0"))).len(),
            1
        );
        assert_eq!(
            lines(Device::new("d").attribute("a", AttributeValue::Ints(Vec::new()))).len(),
            1
        );
        assert_eq!(lines(Device::new("d").capacity("memory", "80 Gi")).len(), 1);
    }

    #[test]
    fn more_than_there_may_be_and_what_occurs_twice_is_beyond() {
        let many = (0..33).fold(Device::new("d"), |device, n| {
            device.attribute(format!("a{n}"), n)
        });
        assert_eq!(
            lines(many),
            ["device p/d: attributes and capacities: 33, at most 32"]
        );
        assert_eq!(
            lines(Device::new("d").attribute("a", 1).attribute("a", 2)).len(),
            1
        );
        let twice = Pool::new("p")
            .device(Device::new("d"))
            .device(Device::new("d"));
        assert_eq!(
            inventory(&Inventory::new().pool(twice)),
            [r#"devices of pool p: "d" occurs twice"#]
        );
    }

    #[test]
    fn counters_must_be_those_of_the_pool_and_policies_those_of_shared_devices() {
        let taken = CounterSet::new("memory").counter("slices", "1");
        assert_eq!(lines(Device::new("d").consumes(taken.clone())).len(), 1);
        let pool = Pool::new("p")
            .shared_counters(taken.clone())
            .device(Device::new("d").consumes(taken));
        assert_eq!(
            inventory(&Inventory::new().pool(pool)),
            Vec::<String>::new()
        );

        let shared = Device::new("d")
            .with_capacity(Capacity::new("m", "1").policy(CapacityPolicy::default()));
        assert_eq!(lines(shared.clone()).len(), 1);
        assert_eq!(
            lines(shared.allow_multiple_allocations(true)),
            Vec::<String>::new()
        );
    }

    #[test]
    fn edits_need_absolute_paths_and_a_right_on_each_node() {
        let with = |edits: ContainerEdits| prepared(&Prepared::new().edits(edits)).len();
        assert_eq!(
            with(ContainerEdits::new().device_node("/dev/fuse").env("A", "b")),
            0
        );
        assert_eq!(with(ContainerEdits::new().device_node("dev/fuse")), 1);
        assert_eq!(
            with(ContainerEdits::new().device_node("/dev/../etc/passwd")),
            1
        );
        assert_eq!(
            with(
                ContainerEdits::new()
                    .device_node(DeviceNode::new("/dev/fuse").access(NodeAccess::default()))
            ),
            1
        );
        assert_eq!(with(ContainerEdits::new().env("A", "1").env("A", "2")), 1);
        assert_eq!(
            prepared(&Prepared {
                memo: vec![0; 65537],
                ..Prepared::new()
            })
            .len(),
            1
        );
    }

    #[test]
    fn a_problem_has_a_code_of_words_and_a_message() {
        assert_eq!(
            problem(&Problem::invalid("no-such-profile", "a")),
            Vec::<String>::new()
        );
        assert_eq!(problem(&Problem::invalid("No such", "")).len(), 2);
    }

    #[test]
    fn a_description_needs_a_dns_name_and_a_semantic_version() {
        assert_eq!(
            driver_info(&DriverInfo::new("leds.example.com", "0.1.0")),
            Vec::<String>::new()
        );
        assert_eq!(driver_info(&DriverInfo::new("Leds", "1")).len(), 2);
    }
}
