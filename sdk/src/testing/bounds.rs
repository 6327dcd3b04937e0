//! The bounds of the contract, as the host checks them. Each function returns the violations, one sentence each.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex::Regex;

use crate::{
    AttributeValue, CapacityChoice, CounterSet, Device, DeviceHealth, DriverInfo, Edits, Inventory, Pool,
    Prepared, Problem,
};

const POOLS_MAX: usize = 64;
const DEVICES_MAX: usize = 4096;
const FACTS_MAX: usize = 32;
const IDENTITIES_MAX: usize = 16;
const TAINTS_MAX: usize = 16;
const EDITS_MAX: usize = 64;
const DETAILS_MAX: usize = 16;
const ANNOTATIONS_MAX: usize = 16;
const MEMO_BYTES_MAX: usize = 64 << 10;
const STATUS_BYTES_MAX: usize = 10 << 10;
const PATH_BYTES_MAX: usize = 4096;
const KEY_BYTES_MAX: usize = 253;
const TEXT_BYTES_MAX: usize = 1 << 10;
const VALUE_BYTES_MAX: usize = 64;

static LABEL: LazyLock<Regex> = LazyLock::new(|| pattern("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"));
static SUBDOMAIN: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"));
static IDENTIFIER: LazyLock<Regex> = LazyLock::new(|| pattern("[A-Za-z_][A-Za-z0-9_]{0,31}"));
static CODE: LazyLock<Regex> = LazyLock::new(|| pattern("[a-z0-9]+(-[a-z0-9]+)*"));
static QUANTITY: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?"));

fn pattern(pattern: &str) -> Regex {
    Regex::new(&format!("^(?:{pattern})$")).expect("the patterns above are regular expressions")
}

fn is_subdomain(text: &str, bytes_max: usize) -> bool {
    text.len() <= bytes_max && SUBDOMAIN.is_match(text)
}

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

    fn at_most(&mut self, what: &str, count: usize, most: usize) {
        self.demand(count <= most, || format!("{what}: {count}, at most {most}"));
    }

    fn unique<'a>(&mut self, what: &str, names: impl IntoIterator<Item = &'a str>) {
        let mut seen = BTreeSet::new();
        for name in names {
            self.demand(seen.insert(name), || format!("{what}: {name:?} occurs twice"));
        }
    }

    fn quantity(&mut self, what: &str, value: &str) {
        self.demand(QUANTITY.is_match(value), || format!("{what}: {value:?} is not a quantity"));
    }

    fn labels(&mut self, what: &str, labels: &[(String, String)]) {
        for (key, value) in labels {
            self.demand(!key.is_empty() && key.len() <= KEY_BYTES_MAX, || format!("{what}: key {key:?}"));
            self.at_most(&format!("{what}: bytes of {key}"), value.len(), TEXT_BYTES_MAX);
        }
    }

    fn absolute(&mut self, what: &str, path: &str) {
        let plain = path.starts_with('/') && !path.split('/').any(|segment| segment == "..");
        self.demand(plain && path.len() <= PATH_BYTES_MAX, || {
            format!("{what}: {path:?} is not an absolute path")
        });
    }
}

/// Returns the violations of the bounds in a driver's description.
pub fn driver_info(info: &DriverInfo) -> Vec<String> {
    let mut report = Report::default();
    report.demand(is_subdomain(&info.name, 63), || {
        format!("name: {:?} is not a DNS subdomain of at most 63 bytes", info.name)
    });
    report.demand(semver::Version::parse(&info.version).is_ok(), || {
        format!("version: {:?} is not a semantic version", info.version)
    });
    report.at_most("bytes of summary", info.summary.len(), TEXT_BYTES_MAX);
    report.labels("annotations", &info.annotations);
    report.lines
}

/// Returns the violations of the bounds in an inventory.
pub fn inventory(inventory: &Inventory) -> Vec<String> {
    let mut report = Report::default();
    report.at_most("pools", inventory.pools.len(), POOLS_MAX);
    report.at_most("devices", inventory.pools.iter().map(|pool| pool.devices.len()).sum(), DEVICES_MAX);
    report.unique("pools", inventory.pools.iter().map(|pool| pool.name.as_str()));
    inventory.pools.iter().for_each(|pool| check_pool(&mut report, pool));
    report.lines
}

fn check_pool(report: &mut Report, pool: &Pool) {
    let name = &pool.name;
    report.demand(is_subdomain(name, 253), || format!("pool {name:?}: name is not a DNS subdomain"));
    report.unique(&format!("devices of pool {name}"), pool.devices.iter().map(|device| device.name.as_str()));
    check_counters(report, &format!("pool {name}"), &pool.shared_counters);
    report.labels(&format!("annotations of pool {name}"), &pool.annotations);
    if let Some(resource) = &pool.extended_resource {
        let parts = resource.split_once('/');
        let named = parts.is_some_and(|(domain, rest)| is_subdomain(domain, 253) && !rest.is_empty());
        report.demand(named, || format!("pool {name}: {resource:?} is not an extended resource"));
    }
    for device in &pool.devices {
        check_device(report, pool, device);
    }
}

fn check_device(report: &mut Report, pool: &Pool, device: &Device) {
    let at = format!("device {}/{}", pool.name, device.name);
    report.demand(LABEL.is_match(&device.name), || format!("{at}: name is not a DNS label"));
    report.at_most(
        &format!("{at}: attributes and capacities"),
        device.attributes.len() + device.capacities.len(),
        FACTS_MAX,
    );
    report.unique(
        &format!("{at}: attributes"),
        device.attributes.iter().map(|attribute| attribute.name.as_str()),
    );
    report.unique(
        &format!("{at}: capacities"),
        device.capacities.iter().map(|capacity| capacity.name.as_str()),
    );
    for attribute in &device.attributes {
        check_fact_name(report, &at, &attribute.name);
        check_value(report, &format!("{at}: {}", attribute.name), &attribute.value);
    }
    check_capacities(report, &at, device);
    report.at_most(&format!("{at}: taints"), device.taints.len(), TAINTS_MAX);
    report.at_most(&format!("{at}: identities"), device.identity.len(), IDENTITIES_MAX);
    for identity in &device.identity {
        report.demand(!identity.is_empty() && identity.len() <= KEY_BYTES_MAX, || {
            format!("{at}: identity {identity:?}")
        });
    }
    check_counters(report, &at, &device.consumes);
    for set in &device.consumes {
        let shared = pool.shared_counters.iter().any(|shared| shared.name == set.name);
        report.demand(shared, || format!("{at}: the pool has no counters {:?}", set.name));
    }
    report.labels(&format!("{at}: annotations"), &device.annotations);
}

fn check_fact_name(report: &mut Report, at: &str, name: &str) {
    let fits = match name.split_once('/') {
        Some((domain, name)) => is_subdomain(domain, 63) && IDENTIFIER.is_match(name),
        None => IDENTIFIER.is_match(name),
    };
    report.demand(fits, || format!("{at}: {name:?} is not the name of an attribute or capacity"));
}

fn check_value(report: &mut Report, at: &str, value: &AttributeValue) {
    let (texts, versions): (&[String], &[String]) = match value {
        AttributeValue::Text(text) => (std::slice::from_ref(text), &[]),
        AttributeValue::Texts(texts) => (texts, &[]),
        AttributeValue::Version(version) => (&[], std::slice::from_ref(version)),
        AttributeValue::Versions(versions) => (&[], versions),
        _ => (&[], &[]),
    };
    for text in texts.iter().chain(versions) {
        report.at_most(&format!("{at}: bytes"), text.len(), VALUE_BYTES_MAX);
    }
    for version in versions {
        report.demand(semver::Version::parse(version).is_ok(), || {
            format!("{at}: {version:?} is not a semantic version")
        });
    }
}

fn check_capacities(report: &mut Report, at: &str, device: &Device) {
    for capacity in &device.capacities {
        check_fact_name(report, at, &capacity.name);
        let at = format!("{at}: {}", capacity.name);
        report.quantity(&at, &capacity.value);
        let Some(policy) = &capacity.policy else { continue };
        report.demand(device.allow_multiple_allocations, || {
            format!("{at}: a policy is only for devices that allow several allocations")
        });
        let range = match &policy.choice {
            CapacityChoice::Any => Vec::new(),
            CapacityChoice::Values(values) => values.iter().collect(),
            CapacityChoice::Range { min, max, step } => {
                [Some(min), max.as_ref(), step.as_ref()].into_iter().flatten().collect()
            }
        };
        for amount in range.into_iter().chain(&policy.default_amount) {
            report.quantity(&at, amount);
        }
    }
}

fn check_counters(report: &mut Report, at: &str, sets: &[CounterSet]) {
    report.unique(&format!("{at}: counter sets"), sets.iter().map(|set| set.name.as_str()));
    for set in sets {
        report.demand(LABEL.is_match(&set.name), || {
            format!("{at}: counter set {:?} is not a DNS label", set.name)
        });
        report.unique(&format!("{at}: counters"), set.counters.iter().map(|counter| counter.name.as_str()));
        for counter in &set.counters {
            report.quantity(&format!("{at}: counter {}", counter.name), &counter.value);
        }
    }
}

/// Returns the violations of the bounds in the result of a prepare.
pub fn prepared(prepared: &Prepared) -> Vec<String> {
    let mut report = Report::default();
    report.at_most("bytes of memo", prepared.memo.len(), MEMO_BYTES_MAX);
    report.at_most("annotations", prepared.annotations.len(), ANNOTATIONS_MAX);
    report.labels("annotations", &prepared.annotations);
    for (key, _) in &prepared.annotations {
        report.demand(!key.starts_with("cdi.k8s.io/"), || {
            format!("annotation {key:?}: devices are injected by edits only")
        });
    }
    check_edits(&mut report, "edits", &prepared.edits);
    for device in &prepared.devices {
        let at = format!("device {}/{}", device.pool, device.device);
        let base =
            !device.requests.is_empty() && !device.requests.iter().any(|request| request.contains('/'));
        report.demand(base, || format!("{at}: requests {:?} are not base requests", device.requests));
        check_edits(&mut report, &at, &device.edits);
        if let Some(data) = device.status.as_ref().and_then(|status| status.data.as_ref()) {
            report.at_most(&format!("{at}: bytes of data"), data.len(), STATUS_BYTES_MAX);
            let object = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(data);
            report.demand(object.is_ok(), || format!("{at}: data is not a JSON object"));
        }
    }
    report.lines
}

fn check_edits(report: &mut Report, at: &str, edits: &Edits) {
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
    report.labels(&format!("{at}: env"), &edits.env);
    report.unique(&format!("{at}: env"), edits.env.iter().map(|(name, _)| name.as_str()));
    for (name, _) in &edits.env {
        report.demand(!name.contains(['=', '\0']), || format!("{at}: env {name:?}"));
    }
    for node in &edits.device_nodes {
        report.absolute(at, &node.path);
        node.host_path.iter().for_each(|path| report.absolute(at, path));
        let permissions = !node.permissions.is_empty() && node.permissions.chars().all(|c| "rwm".contains(c));
        report.demand(permissions, || format!("{at}: {:?} is not a subset of rwm", node.permissions));
    }
    for mount in &edits.mounts {
        report.absolute(at, &mount.host_path);
        report.absolute(at, &mount.container_path);
    }
    for hook in &edits.hooks {
        report.absolute(at, &hook.path);
    }
}

/// Returns the violations of the bounds in a problem.
pub fn problem(problem: &Problem) -> Vec<String> {
    let mut report = Report::default();
    let code = problem.code.len() <= 63 && CODE.is_match(&problem.code);
    report.demand(code, || format!("code: {:?} is not lower-case words with dashes", problem.code));
    report.demand(!problem.message.is_empty(), || "message: empty".to_owned());
    report.at_most("bytes of message", problem.message.len(), TEXT_BYTES_MAX);
    report.at_most("details", problem.details.len(), DETAILS_MAX);
    report.labels("details", &problem.details);
    report.lines
}

/// Returns the violations of the bounds in a health result.
pub fn health(health: &[DeviceHealth]) -> Vec<String> {
    let mut report = Report::default();
    report.at_most("devices", health.len(), DEVICES_MAX);
    for device in health {
        let at = format!("bytes of message about {}/{}", device.pool, device.device);
        report.at_most(&at, device.message.len(), TEXT_BYTES_MAX);
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
        for name in ["GPU", "-a", "a-", "a_b", "", "a.b", &"a".repeat(64)] {
            assert_eq!(lines(Device::new(name)).len(), 1, "{name}");
        }
        for name in ["0a", "a-b", "a/b/c", "Example.com/a", &"a".repeat(33), "example.com/"] {
            assert_eq!(lines(Device::new("d").attribute(name, 1)).len(), 1, "{name}");
        }
    }

    #[test]
    fn values_are_held_to_their_kind_and_size() {
        assert_eq!(lines(Device::new("d").attribute("a", "x".repeat(65))).len(), 1);
        assert_eq!(lines(Device::new("d").attribute("a", AttributeValue::version("1.0"))).len(), 1);
        for amount in ["80 Gi", "Gi", "", "8GiB"] {
            assert_eq!(lines(Device::new("d").capacity("memory", amount)).len(), 1, "{amount}");
        }
    }

    #[test]
    fn more_than_there_may_be_and_what_occurs_twice_is_beyond() {
        let many = (0..33).fold(Device::new("d"), |device, n| device.attribute(format!("a{n}"), n));
        assert_eq!(lines(many), ["device p/d: attributes and capacities: 33, at most 32"]);
        assert_eq!(lines(Device::new("d").attribute("a", 1).attribute("a", 2)).len(), 1);
        let twice = Pool::new("p").device(Device::new("d")).device(Device::new("d"));
        assert_eq!(inventory(&Inventory::new().pool(twice)), [r#"devices of pool p: "d" occurs twice"#]);
    }

    #[test]
    fn counters_must_be_those_of_the_pool_and_policies_those_of_shared_devices() {
        let taken = CounterSet::new("memory").counter("slices", "1");
        assert_eq!(lines(Device::new("d").consumes(taken.clone())).len(), 1);
        let pool = Pool::new("p").shared_counters(taken.clone()).device(Device::new("d").consumes(taken));
        assert_eq!(inventory(&Inventory::new().pool(pool)), Vec::<String>::new());

        let shared =
            Device::new("d").with_capacity(Capacity::new("m", "1").policy(CapacityPolicy::default()));
        assert_eq!(lines(shared.clone()).len(), 1);
        assert_eq!(lines(shared.allow_multiple_allocations(true)), Vec::<String>::new());
    }

    #[test]
    fn edits_need_absolute_paths_and_known_permissions() {
        let with = |edits: Edits| prepared(&Prepared::new().edits(edits)).len();
        assert_eq!(with(Edits::new().device_node("/dev/fuse").env("A", "b")), 0);
        assert_eq!(with(Edits::new().device_node("dev/fuse")), 1);
        assert_eq!(with(Edits::new().device_node("/dev/../etc/passwd")), 1);
        assert_eq!(with(Edits::new().device_node(DeviceNode::new("/dev/fuse").permissions("x"))), 1);
        assert_eq!(with(Edits::new().env("A", "1").env("A", "2")), 1);
        assert_eq!(prepared(&Prepared { memo: vec![0; 65537], ..Prepared::new() }).len(), 1);
    }

    #[test]
    fn a_problem_has_a_code_of_words_and_a_message() {
        assert_eq!(problem(&Problem::invalid("no-such-profile", "a")), Vec::<String>::new());
        assert_eq!(problem(&Problem::invalid("No such", "")).len(), 2);
    }

    #[test]
    fn a_description_needs_a_dns_name_and_a_semantic_version() {
        assert_eq!(driver_info(&DriverInfo::new("leds.example.com", "0.1.0")), Vec::<String>::new());
        assert_eq!(driver_info(&DriverInfo::new("Leds", "1")).len(), 2);
    }
}
