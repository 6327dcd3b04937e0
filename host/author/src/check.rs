//! `nodedock driver check`: what is wrong with a driver and its files, and what will surprise its operator.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use nodedock_base::worded;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::compile_cache::CompileCacheArgs;
use super::workbench::{Subject, SubjectArgs, Workbench, facts};
use nodedock_base::error::chain;
use nodedock_command::output::{Column, Format, print, table};
use nodedock_command::{CommandError, parameters};
use nodedock_core::driver::ClaimDriver;
use nodedock_core::driver::values::NoJournal;
use nodedock_core::recording::{CallOutcome, RecordedCall};
use nodedock_core::records::SharedClaimTable;
use nodedock_model::grant::{self, Capabilities, Grant, LimitValues, Limits, ValueGrant, pattern};
use nodedock_model::{Inventory, Problem, ProblemCode};
use nodedock_wasm::{DriverInfo, Stats, Trigger, WasmDriver};

/// Another boot of the same machine, whose ID is another in each of its parts.
const OTHER_BOOT: &str = "f1e2d3c4-b5a6-4978-b9a8-e7f6d5c4b3a2";
/// Changed devices in one trigger, as in a daemon's.
const EVENT_PATHS_MAX: usize = 256;
/// A key that no config has.
const UNKNOWN_KEY: &str = "nodedock-driver-check";
/// Names that a finding lists.
const NAMES_MAX: usize = 5;
/// Part of a limit above which a driver is close to it, in percent.
const CLOSE_PERCENT: u64 = 80;

#[derive(Args)]
pub struct CheckArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Recorded machine: a directory or a tar file with its /sys [default: this machine]
    #[arg(long, value_name = "SNAPSHOT")]
    hardware: Option<PathBuf>,
    /// Opaque parameters of a claim or class to be checked too: a JSON object, or a file with JSON or YAML
    #[arg(long, value_name = "FILE|JSON")]
    parameters: Option<String>,
    /// The same machine after a change of its hardware: the driver discovers on both
    #[arg(long, value_name = "SNAPSHOT", requires = "hardware")]
    then: Option<PathBuf>,
    #[command(flatten)]
    cache: CompileCacheArgs,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

worded! {
    /// The kinds of findings. The names are for scripts and do not change.
    Lint {
        /// The file is no driver of this contract.
        NotLoadable = "not-loadable",
        /// The driver requests more than its grant.
        GrantMissing = "grant-missing",
        /// A schema of the driver is no JSON Schema, or exceeds a bound.
        SchemaInvalid = "schema-invalid",
        ConfigInvalid = "config-invalid",
        ParametersInvalid = "parameters-invalid",
        /// A discovery returned a problem, or exceeded a bound.
        DiscoveryFailed = "discovery-failed",
        /// Two discoveries of the same machine have other pools or devices.
        NamesUnstable = "names-unstable",
        /// Two discoveries of the same machine differ otherwise.
        DevicesUnstable = "devices-unstable",
        NoDevices = "no-devices",
        NoIdentity = "no-identity",
        /// A rule of the grant that no request needs.
        GrantUnneeded = "grant-unneeded",
        /// A rule of the grant for reads that a discovery does not use.
        GrantUnused = "grant-unused",
        NoConfigSchema = "no-config-schema",
        ConfigAcceptsAnything = "config-accepts-anything",
        NoParametersSchema = "no-parameters-schema",
        ParametersAcceptAnything = "parameters-accept-anything",
        LimitClose = "limit-close",
    }
}

impl Lint {
    fn severity(self) -> Severity {
        match self {
            Self::NotLoadable
            | Self::GrantMissing
            | Self::SchemaInvalid
            | Self::ConfigInvalid
            | Self::ParametersInvalid
            | Self::DiscoveryFailed
            | Self::NamesUnstable => Severity::Error,
            Self::DevicesUnstable
            | Self::NoDevices
            | Self::NoIdentity
            | Self::GrantUnneeded
            | Self::GrantUnused
            | Self::NoConfigSchema
            | Self::ConfigAcceptsAnything
            | Self::NoParametersSchema
            | Self::ParametersAcceptAnything
            | Self::LimitClose => Severity::Warning,
        }
    }
}

impl Serialize for Lint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    Error,
    Warning,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Finding {
    severity: Severity,
    id: Lint,
    message: String,
}

impl Finding {
    const COLUMNS: &'static [Column<Self>] = &[
        ("SEVERITY", |row| {
            match row.severity {
                Severity::Error => "error",
                Severity::Warning => "warning",
            }
            .to_owned()
        }),
        ("ID", |row| row.id.as_str().to_owned()),
        ("FINDING", |row| row.message.clone()),
    ];
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, id: Lint, message: impl Into<String>) {
        self.0.push(Finding {
            severity: id.severity(),
            id,
            message: message.into(),
        });
    }

    fn has(&self, id: Lint) -> bool {
        self.0.iter().any(|finding| finding.id == id)
    }

    fn has_errors(&self) -> bool {
        self.0
            .iter()
            .any(|finding| finding.severity == Severity::Error)
    }
}

pub(super) async fn run(args: CheckArgs) -> Result<()> {
    let subject = args.subject.read()?;
    let bench = Workbench::new(args.hardware.as_deref(), &args.cache)?;
    let parameters = args.parameters.as_deref().map(parameters::read);
    let parameters = parameters.transpose()?;
    let mut findings = Findings::default();
    let inventory = check(&bench, &subject, parameters.as_deref(), &mut findings).await;
    if let (Some(then), Some(before)) = (&args.then, inventory) {
        let changed = Workbench::new(Some(then), &args.cache)?;
        check_change(&changed, &subject, &before, &mut findings).await;
    }
    print(args.output, &findings.0, || {
        table(
            args.output,
            Finding::COLUMNS,
            Finding::COLUMNS.len(),
            &findings.0,
            "no findings",
        )
    })?;
    CommandError::unless_done(!findings.has_errors())
}

/// Returns the devices of the machine, if a discovery succeeded.
async fn check(
    bench: &Workbench,
    subject: &Subject,
    parameters: Option<&str>,
    findings: &mut Findings,
) -> Option<Inventory> {
    let Subject {
        file,
        grant,
        config,
        ..
    } = subject;
    let driver = match bench
        .host
        .load(file.clone(), grant.clone(), config.clone())
        .await
    {
        Ok(driver) => driver,
        Err(error) => {
            findings.add(Lint::NotLoadable, chain(&error));
            return None;
        }
    };
    check_grant(driver.info(), subject, findings);
    if !findings.has_errors() {
        check_config(bench, &driver, subject, findings).await;
    }
    if let Some(parameters) = parameters.filter(|_| !findings.has_errors()) {
        check_parameters(&driver, parameters, findings).await;
    }
    let mut inventory = None;
    // A driver that would not serve finds nothing that counts.
    if !findings.has_errors() {
        let recording = bench.recordings.begin(driver.info().name.as_str());
        inventory = check_discovery(bench, &driver, findings).await;
        // A machine without the hardware does not show what is used.
        if recording.is_ok() && !findings.has_errors() && !findings.has(Lint::NoDevices) {
            check_reads(bench, &driver, grant, findings).await;
        }
    }
    if !findings.has_errors() {
        check_limits(&driver.stats(), driver.info(), grant, findings);
    }
    inventory
}

/// Checks the devices that are in a machine before and after a change.
async fn check_change(
    changed: &Workbench,
    subject: &Subject,
    before: &Inventory,
    findings: &mut Findings,
) {
    let driver = match changed.load(subject).await {
        Ok(driver) => driver,
        Err(error) => return findings.add(Lint::NotLoadable, format!("{error:#}")),
    };
    match discover(&driver, Trigger::Events(Vec::new())).await {
        Ok(after) => {
            let renamed = renamed(before, &after);
            if !renamed.is_empty() {
                let message = format!(
                    "after the change of the machine the same hardware has another name: {}; claims of these devices fail",
                    listed(&renamed)
                );
                findings.add(Lint::NamesUnstable, message);
            }
        }
        Err(message) => findings.add(
            Lint::DiscoveryFailed,
            format!("after the change of the machine: {message}"),
        ),
    }
}

/// Hardware of one device each, before and after, whose device has another name.
fn renamed(before: &Inventory, after: &Inventory) -> Vec<String> {
    let (before, after) = (by_identity(before), by_identity(after));
    let renamed = before.iter().filter_map(|(identity, names)| {
        let (old, new) = (only(names)?, only(after.get(identity)?)?);
        (old != new).then(|| format!("{identity} was {old} and is {new}"))
    });
    renamed.collect()
}

fn only(names: &BTreeSet<String>) -> Option<&String> {
    names.first().filter(|_| names.len() == 1)
}

/// The devices of each piece of hardware.
fn by_identity(inventory: &Inventory) -> BTreeMap<String, BTreeSet<String>> {
    let mut found = BTreeMap::<_, BTreeSet<_>>::new();
    for (pool, devices) in &inventory.pools {
        for (name, device) in &devices.devices {
            for identity in &device.identity {
                let names = found.entry(identity.clone()).or_default();
                names.insert(format!("{pool}/{name}"));
            }
        }
    }
    found
}

fn check_grant(info: &DriverInfo, subject: &Subject, findings: &mut Findings) {
    let Subject {
        grant, grant_path, ..
    } = subject;
    let missing = grant::missing(&info.capabilities, &info.limits, grant);
    if !missing.is_empty() {
        let whose = match grant_path {
            Some(path) => format!("the grant {}", path.display()),
            None => "the empty grant: there is no NAME.grant.yaml".to_owned(),
        };
        findings.add(
            Lint::GrantMissing,
            format!(
                "the driver would be blocked by {whose}; not granted: {}",
                missing.join("; ")
            ),
        );
    }
    let unneeded = unneeded(&info.capabilities, grant);
    if !unneeded.is_empty() {
        let message = format!(
            "no request of the driver needs these rules of the grant: {}",
            unneeded.join("; ")
        );
        findings.add(Lint::GrantUnneeded, message);
    }
}

/// A list of capabilities, by its key in a grant.
type List<T> = (&'static str, fn(&mut Capabilities) -> &mut Vec<T>);

const LISTS: [List<String>; 7] = [
    ("sysfsRead", |allowed| &mut allowed.sysfs_read),
    ("hostFiles", |allowed| &mut allowed.host_files),
    ("deviceNodes", |allowed| &mut allowed.device_nodes),
    ("mounts", |allowed| &mut allowed.mounts),
    ("hooks", |allowed| &mut allowed.hooks),
    ("env", |allowed| &mut allowed.env),
    ("netDevices", |allowed| &mut allowed.net_devices),
];

const VALUE_LISTS: [List<ValueGrant>; 2] = [
    ("sysfsWrite", |allowed| &mut allowed.sysfs_write),
    ("pciDriver", |allowed| &mut allowed.pci_driver),
];

/// The rules of a grant without which as many requests are granted, one readable line each.
fn unneeded(request: &Capabilities, grant: &Grant) -> Vec<String> {
    let mut rules = Vec::new();
    for (key, list) in LISTS {
        let mut request_of_list = request.clone();
        let asked = list(&mut request_of_list);
        // A glob of a request covers what the host gives by its exact path only.
        let names = |rule: &String| {
            pattern::is_literal(rule) && asked.iter().any(|asked| pattern::covers(asked, rule))
        };
        let unneeded = without_each(request, grant, list).filter(|rule| !names(rule));
        rules.extend(unneeded.map(|rule| format!("{key}: {rule}")));
    }
    for (key, list) in VALUE_LISTS {
        let unneeded = without_each(request, grant, list);
        rules.extend(unneeded.map(|rule| format!("{key}: {} with {}", rule.glob, rule.pattern)));
    }
    rules
}

fn without_each<T>(
    request: &Capabilities,
    grant: &Grant,
    list: fn(&mut Capabilities) -> &mut Vec<T>,
) -> impl Iterator<Item = T> {
    let missing = |grant: &Grant| grant::missing(request, &LimitValues::new(), grant).len();
    let (now, count) = (missing(grant), list(&mut grant.allowed.clone()).len());
    (0..count).filter_map(move |at| {
        let mut without = grant.clone();
        let rule = list(&mut without.allowed).remove(at);
        (missing(&without) == now).then_some(rule)
    })
}

async fn check_config(
    bench: &Workbench,
    driver: &WasmDriver,
    subject: &Subject,
    findings: &mut Findings,
) {
    if let Err(problem) = driver.validate_config(&driver.look_call()).await {
        let lint = match problem.code == ProblemCode::SchemaInvalid {
            true => Lint::SchemaInvalid,
            false => Lint::ConfigInvalid,
        };
        return findings.add(lint, text(&problem));
    }
    let Some(config) = &subject.config else {
        return;
    };
    if !driver.surface().facets().contains(&"configuration") {
        let message =
            "there is a config, and the driver has no schema for it: export `configuration`";
        return findings.add(Lint::NoConfigSchema, message);
    }
    let Some(probe) = with_unknown_key(config) else {
        return;
    };
    let probed = bench
        .host
        .load(subject.file.clone(), subject.grant.clone(), Some(probe))
        .await;
    let Ok(probed) = probed else { return };
    if probed.validate_config(&probed.look_call()).await.is_ok() {
        let message = format!(
            "the config is accepted with the unknown key {UNKNOWN_KEY:?} too, so that a misspelt key is not found"
        );
        findings.add(Lint::ConfigAcceptsAnything, message);
    }
}

async fn check_parameters(driver: &WasmDriver, parameters: &str, findings: &mut Findings) {
    let call = driver.look_call();
    let with_probe = with_unknown_key(parameters);
    let entries: Vec<_> = [parameters]
        .into_iter()
        .chain(with_probe.as_deref())
        .collect();
    let verdicts = driver.validate_parameters(&call, &entries).await;
    if let Some(Err(problem)) = verdicts.first() {
        return findings.add(Lint::ParametersInvalid, text(problem));
    }
    match driver.parameters_schema(&call).await {
        Err(problem) => findings.add(Lint::SchemaInvalid, text(&problem)),
        Ok(None) => {
            let message = "there are parameters, and the driver has no schema for them: export `configuration` with a `parameters-schema`";
            findings.add(Lint::NoParametersSchema, message);
        }
        Ok(Some(_)) if with_probe.is_some() && verdicts.iter().all(Result::is_ok) => {
            let message = format!(
                "the parameters are accepted with the unknown key {UNKNOWN_KEY:?} too, so that a misspelt key is not found"
            );
            findings.add(Lint::ParametersAcceptAnything, message);
        }
        Ok(Some(_)) => {}
    }
}

fn with_unknown_key(config: &str) -> Option<String> {
    let mut value: Value = serde_json::from_str(config).ok()?;
    value
        .as_object_mut()?
        .insert(UNKNOWN_KEY.to_owned(), Value::Bool(true));
    Some(value.to_string())
}

/// Each call has an instance of its own. The second is in another boot; the others have each trigger that a daemon has for the driver.
/// Returns the devices of the first.
async fn check_discovery(
    bench: &Workbench,
    driver: &WasmDriver,
    findings: &mut Findings,
) -> Option<Inventory> {
    let claims = Arc::<SharedClaimTable>::default();
    let rebooted = driver.on_node(facts(OTHER_BOOT), claims, Arc::new(NoJournal));
    let first = match discover(driver, Trigger::Load).await {
        Ok(inventory) => inventory,
        Err(message) => {
            findings.add(Lint::DiscoveryFailed, message);
            return None;
        }
    };
    check_inventory(&first, findings);
    let mut others = vec![(&rebooted, Trigger::Load, "after a reboot".to_owned())];
    for (trigger, when) in triggers(bench, driver.info()) {
        others.push((driver, trigger, when));
    }
    for (driver, trigger, when) in others {
        match discover(driver, trigger).await {
            Ok(other) => check_same(&first, &other, &when, findings),
            Err(message) => findings.add(Lint::DiscoveryFailed, format!("{when}: {message}")),
        }
    }
    Some(first)
}

/// Discovers the devices, their health and their readings; an error is a message.
async fn discover(driver: &WasmDriver, trigger: Trigger) -> Result<Inventory, String> {
    let found = driver.discover(&driver.look_call(), trigger).await;
    let inventory = found.map_err(|problem| text(&problem))?;
    let health = driver.check_health(&driver.look_call()).await;
    health.map_err(|problem| format!("health: {}", text(&problem)))?;
    let readings = driver.read_telemetry(&driver.look_call()).await;
    readings.map_err(|problem| format!("telemetry: {}", text(&problem)))?;
    Ok(inventory)
}

/// The triggers of later discoveries, each with its name: the timer, a request, and events of each subsystem that the driver names.
fn triggers(bench: &Workbench, info: &DriverInfo) -> Vec<(Trigger, String)> {
    let mut triggers = vec![
        (Trigger::Timer, "by the timer".to_owned()),
        (Trigger::Request, "by a request".to_owned()),
    ];
    for subsystem in &info.event_subsystems {
        let paths = paths_of(bench, subsystem).unwrap_or_else(|problem| {
            tracing::warn!(subsystem, %problem, "the devices of the subsystem are not named in the trigger");
            Vec::new()
        });
        let when = format!("by events of {subsystem}");
        triggers.push((Trigger::Events(paths), when));
    }
    triggers
}

/// The devices of a subsystem, as events name them.
fn paths_of(bench: &Workbench, subsystem: &str) -> Result<Vec<String>, Problem> {
    let io_error = |error: std::io::Error| {
        Problem::unavailable(ProblemCode::IoError, format!("open /sys: {error}"))
    };
    let sys = bench.hardware.open_sys().map_err(io_error)?;
    let mut paths = BTreeSet::new();
    for pattern in [
        format!("class/{subsystem}/*"),
        format!("bus/{subsystem}/devices/*"),
    ] {
        for entry in sys.glob(&pattern)? {
            match sys.read_link(&entry) {
                Ok(path) => drop(paths.insert(path)),
                // A class may have files of its own.
                Err(problem) if problem.code == ProblemCode::NotALink => {}
                Err(problem) => return Err(problem),
            }
        }
    }
    Ok(paths.into_iter().take(EVENT_PATHS_MAX).collect())
}

fn check_same(first: &Inventory, other: &Inventory, when: &str, findings: &mut Findings) {
    let changed: Vec<_> = names(first)
        .symmetric_difference(&names(other))
        .cloned()
        .collect();
    if !changed.is_empty() {
        let message = format!(
            "a discovery {when} has other pools or devices than the first: {}; claims of a device that has another name fail",
            listed(&changed)
        );
        findings.add(Lint::NamesUnstable, message);
    } else if first != other {
        let message = format!(
            "a discovery {when} differs from the first in more than names: the host publishes each change"
        );
        findings.add(Lint::DevicesUnstable, message);
    }
}

fn check_inventory(first: &Inventory, findings: &mut Findings) {
    let (one, without) = (names(first), without_identity(first));
    if one.is_empty() {
        let message = "the driver finds no device here, so that nothing is known of its devices: choose a machine with --hardware";
        return findings.add(Lint::NoDevices, message);
    }
    if !without.is_empty() {
        let message = format!(
            "{} of {} devices have no identity: two drivers may give the same hardware to two containers: {}",
            without.len(),
            one.len(),
            listed(&without)
        );
        findings.add(Lint::NoIdentity, message);
    }
}

fn names(inventory: &Inventory) -> BTreeSet<String> {
    let pools = inventory.pools.iter();
    pools
        .flat_map(|(pool, found)| {
            found
                .devices
                .keys()
                .map(move |device| format!("{pool}/{device}"))
        })
        .collect()
}

fn without_identity(inventory: &Inventory) -> Vec<String> {
    let devices = inventory
        .pools
        .iter()
        .flat_map(|(pool, found)| found.devices.iter().map(move |device| (pool, device)));
    let without = devices.filter(|(_, (_, device))| device.identity.is_empty());
    without
        .map(|(pool, (name, _))| format!("{pool}/{name}"))
        .collect()
}

fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(NAMES_MAX);
    let first = names[..names.len() - more].join(", ");
    if more == 0 {
        first
    } else {
        format!("{first} and {more} more")
    }
}

/// The lists with what a driver may read: the key, the interface of the host's functions that read it, and the rules.
type ReadList = (
    &'static str,
    &'static str,
    fn(&Capabilities) -> &Vec<String>,
);

const READ_LISTS: [ReadList; 3] = [
    ("sysfsRead", "sysfs.", |allowed| &allowed.sysfs_read),
    ("hostFiles", "host-files.", |allowed| &allowed.host_files),
    ("netDevices", "net-interfaces.", |allowed| {
        &allowed.net_devices
    }),
];

/// Compares the grant with what the recorded calls have read.
async fn check_reads(
    bench: &Workbench,
    driver: &WasmDriver,
    grant: &Grant,
    findings: &mut Findings,
) {
    let calls = match bench.recorded(driver.info().name.as_str()).await {
        Ok(calls) => calls,
        Err(error) => {
            return tracing::warn!(%error, "what the driver reads is not compared with its grant");
        }
    };
    for (key, interface, rules) in READ_LISTS {
        let unused = grant::unused(rules(&grant.allowed), &texts(&calls, interface));
        if !unused.is_empty() {
            let unused: Vec<_> = unused.into_iter().map(str::to_owned).collect();
            let message = format!(
                "a discovery on this machine does not use {key}: {}",
                listed(&unused)
            );
            findings.add(Lint::GrantUnused, message);
        }
    }
}

/// Returns the texts passed to the functions of an interface. For a function that lists everything, the names are in its answer.
fn texts(calls: &[RecordedCall], interface: &str) -> BTreeSet<String> {
    let host = calls
        .iter()
        .flat_map(|call| &call.host)
        .filter(|host| host.function.starts_with(interface));
    let texts = host.flat_map(|host| {
        let named = match &host.answer {
            CallOutcome::Returned(answer) => answer["Ok"].as_array(),
            CallOutcome::Failed(_) => None,
        };
        let names = named.into_iter().flatten().map(|item| &item["name"]);
        host.arguments
            .as_array()
            .into_iter()
            .flatten()
            .chain(names)
            .filter_map(Value::as_str)
    });
    texts.map(str::to_owned).collect()
}

fn check_limits(stats: &Stats, info: &DriverInfo, grant: &Grant, findings: &mut Findings) {
    let limits = Limits::new(&info.limits, &grant.limits);
    let cpu_ms = |seconds: f64| (seconds * 1000.0) as u64;
    for (what, used, max, unit) in [
        (
            "memory",
            stats.peak_memory.get() >> 10,
            (limits.memory >> 10) as u64,
            "KiB",
        ),
        (
            "CPU time",
            cpu_ms(stats.peak_cpu_seconds.get()),
            limits.cpu.as_millis() as u64,
            "ms",
        ),
        (
            "calls of the host",
            stats.peak_host_operations.get(),
            limits.host_operations as u64,
            "calls",
        ),
        (
            "data of the host",
            stats.peak_host_bytes.get() >> 10,
            (limits.host_bytes >> 10) as u64,
            "KiB",
        ),
    ] {
        if used * 100 > max * CLOSE_PERCENT {
            findings.add(
                Lint::LimitClose,
                format!("{what}: one call used {used} of {max} {unit}"),
            );
        }
    }
}

fn text(problem: &Problem) -> String {
    format!("{} ({}, {})", problem.message, problem.kind, problem.code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::{Device, DeviceName, Pool, PoolName};

    fn inventory(devices: &[(&str, &[&str])]) -> Inventory {
        let device = |(name, identity): &(&str, &[&str])| {
            let identity = identity.iter().map(|text| (*text).to_owned()).collect();
            (
                DeviceName::new(name).unwrap(),
                Device {
                    identity,
                    ..Device::default()
                },
            )
        };
        let pool = Pool {
            devices: devices.iter().map(device).collect(),
            ..Pool::default()
        };
        Inventory {
            pools: [(PoolName::new("nodes").unwrap(), pool)].into(),
        }
    }

    fn of(first: &Inventory, second: &Inventory) -> Vec<(Lint, String)> {
        let mut findings = Findings::default();
        check_inventory(first, &mut findings);
        check_same(first, second, "after a reboot", &mut findings);
        findings
            .0
            .into_iter()
            .map(|finding| (finding.id, finding.message))
            .collect()
    }

    #[test]
    fn unstable_names_and_identities_are_found() {
        let good = inventory(&[("a", &["dev:/dev/a"])]);
        assert_eq!(of(&good, &good), []);
        let renamed = of(&good, &inventory(&[("b", &["dev:/dev/a"])]));
        let [(Lint::NamesUnstable, message)] = renamed.as_slice() else {
            panic!("{renamed:?}")
        };
        assert!(message.contains("after a reboot"), "{message}");
        assert!(message.contains("nodes/a, nodes/b;"), "{message}");
        let plain = inventory(&[("a", &[])]);
        let [(Lint::NoIdentity, message)] = &of(&plain, &plain)[..] else {
            panic!("no identity")
        };
        assert!(
            message.starts_with("1 of 1 devices") && message.ends_with("nodes/a"),
            "{message}"
        );
        let ids: Vec<_> = of(&good, &plain).into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids, [Lint::DevicesUnstable]);
        let empty = Inventory::default();
        assert_eq!(
            of(&empty, &empty).first().map(|(id, _)| *id),
            Some(Lint::NoDevices)
        );
    }

    #[test]
    fn long_name_lists_are_truncated() {
        let names: Vec<_> = (0..7).map(|index| format!("d{index}")).collect();
        assert_eq!(listed(&names), "d0, d1, d2, d3, d4 and 2 more");
        assert_eq!(listed(&names[..2]), "d0, d1");
    }

    #[test]
    fn unneeded_grant_rules_are_found() {
        let grant = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\nsysfsRead: [class/net/*, class/drm/*]\nenv: [A_*, B]\n\
                     sysfsWrite: [{glob: a/b, pattern: \"1\"}]\n";
        let grant = Grant::parse(grant).unwrap();
        let request = Capabilities {
            sysfs_read: vec!["class/net/eth0".to_owned()],
            env: vec!["A_*".to_owned()],
            ..Capabilities::default()
        };
        assert_eq!(
            unneeded(&request, &grant),
            ["sysfsRead: class/drm/*", "env: B", "sysfsWrite: a/b with 1"]
        );
        assert!(unneeded(&grant.allowed, &grant).is_empty());
    }

    #[test]
    fn renamed_hardware_is_found_after_change() {
        let before = inventory(&[("a", &["x"]), ("b", &["y"]), ("c", &["z"])]);
        let after = inventory(&[("a", &["y"]), ("c", &["z"]), ("d", &["w"])]);
        assert_eq!(renamed(&before, &before), [""; 0]);
        assert_eq!(renamed(&before, &after), ["y was nodes/b and is nodes/a"]);
        let parts = inventory(&[("a-0", &["x"]), ("a-1", &["x"])]);
        assert_eq!(
            renamed(&before, &parts),
            [""; 0],
            "a partition is another device"
        );
    }

    #[test]
    fn probe_adds_unknown_key_to_config() {
        let probe = with_unknown_key(r#"{"pools":[]}"#).unwrap();
        assert_eq!(probe, r#"{"nodedock-driver-check":true,"pools":[]}"#);
        assert_eq!(with_unknown_key("[]"), None);
    }

    #[test]
    fn findings_show_severity_and_id() {
        let mut findings = Findings::default();
        findings.add(Lint::NoIdentity, "a");
        assert!(!findings.has_errors());
        findings.add(Lint::GrantMissing, "b");
        assert!(findings.has_errors());
        let text = table(
            Format::Table,
            Finding::COLUMNS,
            Finding::COLUMNS.len(),
            &findings.0,
            "none",
        );
        assert_eq!(
            text,
            "SEVERITY   ID              FINDING\nwarning    no-identity     a\nerror      grant-missing   b"
        );
    }
}
