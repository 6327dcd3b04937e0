//! The families of metrics, as OpenMetrics text: what the modules count, and the numbers of what is there now.

mod cluster;
mod devices;

use std::collections::BTreeMap;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry;

use super::Admin;
use super::families::{self, Family};
use nodedock_core::driver::DriverStats;
use nodedock_core::driver::stats::{Limit, Operation, Outcome, RpcSeconds, Stats};
use nodedock_core::registry::{DriverState, DriverView};
use nodedock_model::{ClaimState, DriverKind};

pub(super) fn registry(admin: &Admin) -> registry::Registry {
    let mut registry = registry::Registry::default();
    registry.register_collector(Box::new(Node(admin.clone())));
    registry
}

/// One collector for all families, because a registry omits families without samples and adds a period to each help.
struct Node(Admin);

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Node")
    }
}

impl Collector for Node {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (mut out, admin) = (Exposition(encoder), &self.0);
        out.gauges(families::BUILD, [([env!("CARGO_PKG_VERSION")], 1)])?;
        out.metric(
            families::CRASHES,
            admin.restarts.map(ConstCounter::new).as_ref(),
        )?;
        let views = admin.registry.list();
        out.gauges(families::DRIVERS, driver_states(&views))?;
        let drivers = Drivers::of(admin);
        drivers.encode(&mut out)?;
        let readings = readings(admin);
        let readings = readings.iter().map(|(labels, value)| {
            (
                labels.each_ref().map(String::as_str),
                ConstGauge::new(*value),
            )
        });
        out.samples(families::READINGS, readings)?;
        devices::encode(admin, &mut out)?;
        encode_node(admin, &mut out)?;
        let commits = admin.checkpoint.metrics();
        let outcomes = [
            (["durable"], commits.durable.clone()),
            (["failed"], commits.failed.clone()),
        ];
        out.samples(families::COMMITS, outcomes)?;
        out.metric(families::COMMIT_CHANGES, Some(&commits.changes))?;
        out.metric(families::COMMIT_SECONDS, Some(&commits.seconds))?;
        out.metric(families::COMMIT_BYTES, Some(&commits.value_bytes))?;
        out.metric(
            families::DRA_OPERATIONS,
            Some(&admin.manager.claim_metrics.operations),
        )?;
        let rpcs = drivers.native.iter().flat_map(|(name, rpcs)| {
            rpcs.iter()
                .map(move |([method, code], seconds)| ([name, method, code], seconds.clone()))
        });
        out.samples(families::DRA_RPCS, rpcs)?;
        out.gauges(families::DRA_CLAIMS, claims_in_use(admin))?;
        out.gauges(families::PLUGINS, plugins(&views))?;
        let devices = admin.manager.devices.metrics();
        out.metric(families::REGISTRATIONS, Some(&devices.registrations))?;
        out.metric(families::ALLOCATIONS, Some(&devices.allocations))?;
        encode_pod_resources(admin, &mut out)?;
        cluster::encode(admin.cluster.as_ref(), &mut out)
    }
}

/// Writes families, each once.
struct Exposition<'a>(DescriptorEncoder<'a>);

impl Exposition<'_> {
    /// A family without labels, or one whose owner labels its samples. `None`: it has no samples.
    fn metric(&mut self, family: Family, metric: Option<&impl EncodeMetric>) -> fmt::Result {
        let encoder = self
            .0
            .encode_descriptor(family.name, family.help, None, family.kind)?;
        metric.map_or(Ok(()), |metric| metric.encode(encoder))
    }

    /// A family with labels, by their values.
    fn samples<const N: usize, L: ToString>(
        &mut self,
        family: Family,
        samples: impl IntoIterator<Item = ([L; N], impl EncodeMetric)>,
    ) -> fmt::Result {
        let mut encoder = self
            .0
            .encode_descriptor(family.name, family.help, None, family.kind)?;
        debug_assert_eq!(family.labels.len(), N, "{}", family.name);
        for (values, metric) in samples {
            let values = values.iter().map(L::to_string);
            let labels: Vec<(&str, String)> = family.labels.iter().copied().zip(values).collect();
            metric.encode(encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// A family with labels, by their values, of numbers that are read now.
    fn gauges<const N: usize, L: ToString>(
        &mut self,
        family: Family,
        samples: impl IntoIterator<Item = ([L; N], u64)>,
    ) -> fmt::Result {
        self.samples(
            family,
            samples
                .into_iter()
                .map(|(labels, value)| (labels, ConstGauge::new(value))),
        )
    }
}

/// Counts how often each of the label values occurs.
fn counted<L: Ord>(values: impl IntoIterator<Item = L>) -> BTreeMap<L, u64> {
    let mut counts = BTreeMap::new();
    values
        .into_iter()
        .for_each(|value| *counts.entry(value).or_default() += 1);
    counts
}

/// The sources of a driver in each state.
fn driver_states(views: &[DriverView]) -> BTreeMap<[&str; 3], u64> {
    counted(views.iter().filter_map(|view| {
        let DriverView {
            name, kind, state, ..
        }: &DriverView = view;
        Some([name.as_ref()?.as_str(), kind.as_str(), state.as_str()])
    }))
}

/// Counts plugins as a kubelet does: a socket is desired, and is actual when it is registered.
fn plugins(views: &[DriverView]) -> impl Iterator<Item = ([&str; 2], u64)> {
    let plugins = views.iter().filter(|view| view.kind == DriverKind::Grpc);
    plugins.flat_map(|view| {
        let registered = !matches!(view.state, DriverState::Seen | DriverState::Failed);
        let actual = registered.then_some("actual_state_of_world");
        let states = ["desired_state_of_world"].into_iter().chain(actual);
        states.map(|state| ([view.source.as_str(), state], 1))
    })
}

fn claims_in_use(admin: &Admin) -> BTreeMap<[String; 1], u64> {
    let claims = admin.manager.records.claims();
    let prepared = claims
        .iter()
        .filter(|claim| claim.state == ClaimState::Prepared);
    let drivers = prepared.flat_map(|claim| {
        claim
            .drivers
            .keys()
            .map(|driver| Some(driver.to_string()))
            .chain([None])
    });
    let mut in_use = counted(drivers.map(|driver| [driver.unwrap_or_else(|| "<any>".to_owned())]));
    in_use.entry(["<any>".to_owned()]).or_default();
    in_use
}

/// The drivers that serve, and the metrics of each.
struct Drivers {
    wasm: Vec<(String, std::sync::Arc<Stats>)>,
    native: Vec<(String, RpcSeconds)>,
}

impl Drivers {
    fn of(admin: &Admin) -> Self {
        let (mut wasm, mut native) = (Vec::new(), Vec::new());
        for (name, stats) in admin.registry.instances.stats() {
            match stats {
                DriverStats::Wasm(stats) => wasm.push((name.to_string(), stats)),
                DriverStats::Grpc(rpcs) => native.push((name.to_string(), rpcs)),
            }
        }
        Self { wasm, native }
    }

    /// One metric of each WASM driver.
    fn each<M>(&self, metric: impl Fn(&Stats) -> M) -> impl Iterator<Item = ([&str; 1], M)> {
        self.wasm
            .iter()
            .map(move |(name, stats)| ([name.as_str()], metric(stats)))
    }

    fn encode(&self, out: &mut Exposition<'_>) -> fmt::Result {
        self.encode_calls(out)?;
        out.samples(families::CPU, self.each(|stats| stats.cpu_seconds.clone()))?;
        out.samples(
            families::PEAK_CPU,
            self.each(|stats| stats.peak_cpu_seconds.clone()),
        )?;
        out.samples(
            families::PEAK_MEMORY,
            self.each(|stats| stats.peak_memory.clone()),
        )?;
        out.samples(
            families::MEMORY_LIMIT,
            self.each(|stats| stats.memory_limit.clone()),
        )?;
        out.samples(
            families::PEAK_TABLES,
            self.each(|stats| stats.peak_table_elements.clone()),
        )?;
        out.samples(
            families::PEAK_HOST_BYTES,
            self.each(|stats| stats.peak_host_bytes.clone()),
        )?;
        out.samples(
            families::PEAK_HOST_OPERATIONS,
            self.each(|stats| stats.peak_host_operations.clone()),
        )?;
        out.samples(
            families::TRAPS,
            self.each(|stats| ConstCounter::new(stats.ended(Outcome::Trap))),
        )?;
        let refusals = self.wasm.iter().flat_map(|(name, stats)| {
            Limit::ALL
                .iter()
                .map(move |limit| ([name, limit.as_str()], stats.refusals(*limit).clone()))
        });
        out.samples(families::LIMITS, refusals)?;
        out.samples(
            families::REFUSED,
            self.each(|stats| stats.answers_refused.clone()),
        )?;
        out.samples(
            families::LOG_LINES,
            self.each(|stats| stats.log_lines.clone()),
        )?;
        out.samples(
            families::LOG_DROPPED,
            self.each(|stats| ConstCounter::new(stats.log_lines_dropped())),
        )?;
        out.samples(
            families::HOST_BYTES,
            self.each(|stats| stats.host_bytes.clone()),
        )?;
        out.samples(
            families::HOST_OPERATIONS,
            self.each(|stats| stats.host_operations.clone()),
        )
    }

    fn encode_calls(&self, out: &mut Exposition<'_>) -> fmt::Result {
        let calls = self.each_operation().flat_map(|(name, stats, operation)| {
            Outcome::ALL.iter().map(move |outcome| {
                (
                    [name, operation.as_str(), outcome.as_str()],
                    stats.calls(operation, *outcome).clone(),
                )
            })
        });
        out.samples(families::CALLS, calls)?;
        let seconds = self.each_operation().map(|(name, stats, operation)| {
            ([name, operation.as_str()], stats.seconds(operation).clone())
        });
        out.samples(families::CALL_SECONDS, seconds)
    }

    fn each_operation(&self) -> impl Iterator<Item = (&str, &Stats, Operation)> {
        self.wasm
            .iter()
            .map(|(name, stats)| (name.as_str(), &**stats))
            .flat_map(|(name, stats)| {
                Operation::ALL
                    .iter()
                    .map(move |operation| (name, stats, *operation))
            })
    }
}

/// The readings of the devices that drivers have now: driver, pool, device, reading.
fn readings(admin: &Admin) -> Vec<([String; 4], f64)> {
    let mut all = Vec::new();
    for (driver, published) in admin.registry.instances.published() {
        for ((pool, device), readings) in &published.telemetry.readings {
            if published.inventory.device(pool, device).is_none() {
                continue;
            }
            all.extend(readings.iter().map(|(name, value)| {
                let labels = [
                    driver.to_string(),
                    pool.to_string(),
                    device.to_string(),
                    name.clone(),
                ];
                (labels, *value)
            }));
        }
    }
    all
}

fn encode_node(admin: &Admin, out: &mut Exposition<'_>) -> fmt::Result {
    let mut claims = counted(
        admin
            .manager
            .records
            .claims()
            .iter()
            .map(|claim| [claim.state.as_str()]),
    );
    for state in [
        ClaimState::Preparing,
        ClaimState::Prepared,
        ClaimState::Unpreparing,
    ] {
        claims.entry([state.as_str()]).or_default();
    }
    out.gauges(families::CLAIMS, claims)?;
    devices::encode_waiting(admin, out)?;
    out.metric(
        families::PODS,
        Some(&ConstGauge::new(admin.manager.pods.count() as u64)),
    )?;
    let conditions = admin.conditions.list().into_iter();
    out.gauges(
        families::CONDITIONS,
        counted(conditions.map(|condition| [condition.problem.code])),
    )?;
    out.metric(
        families::CDI_AGAIN,
        Some(&admin.manager.claim_metrics.files_rendered_again),
    )?;
    out.metric(
        families::VALUES_LEFT,
        Some(&admin.manager.left_values.values),
    )
}

fn encode_pod_resources(admin: &Admin, out: &mut Exposition<'_>) -> fmt::Result {
    let counters = &admin.pod_resources;
    let (v1, v1alpha1) = (["v1"], ["v1alpha1"]);
    let requests = [&counters.list, &counters.get_allocatable, &counters.get]
        .map(Counter::get)
        .iter()
        .sum::<u64>();
    let requests = [
        (v1, ConstCounter::new(requests)),
        (v1alpha1, ConstCounter::new(counters.list_v1alpha1.get())),
    ];
    out.samples(families::POD_RESOURCES, requests)?;
    let lists = [
        (v1, counters.list.clone()),
        (v1alpha1, counters.list_v1alpha1.clone()),
    ];
    out.samples(families::POD_RESOURCES_LIST, lists)?;
    out.samples(
        families::POD_RESOURCES_ALLOCATABLE,
        [(v1, counters.get_allocatable.clone())],
    )?;
    out.samples(families::POD_RESOURCES_GET, [(v1, counters.get.clone())])?;
    out.samples(
        families::POD_RESOURCES_GET_ERRORS,
        [(v1, counters.get_errors.clone())],
    )
}
