//! What the managers counted, as OpenMetrics text.

mod cluster;

use std::collections::BTreeMap;
use std::fmt::{Debug, Error, Formatter};
use std::sync::atomic::Ordering::Relaxed;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeMetric, MetricEncoder, NoLabelSet, text,
};
use prometheus_client::registry;

use super::Admin;
use super::families::{self, Family};
use nodedock_base::metrics::HistogramView;
use nodedock_core::driver::DriverStats;
use nodedock_core::registry::{DriverState, DriverView};
use nodedock_model::{ClaimState, DriverKind};
use nodedock_native::grpc::RpcSeconds;
use nodedock_wasm::{Outcome, Stats};

/// All of it, made anew for each who asks: what is gone is told no more.
pub(super) fn exposition(admin: &Admin) -> Result<String, Error> {
    let mut registry = registry::Registry::default();
    registry.register_collector(Box::new(Node(admin.clone())));
    let mut told = String::new();
    text::encode(&mut told, &registry)?;
    Ok(told)
}

/// The node's numbers.
struct Node(Admin);

impl Debug for Node {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result<(), Error> {
        f.write_str("Node")
    }
}

impl Collector for Node {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let (mut told, admin) = (Told(encoder), &self.0);
        told.gauges(families::BUILD, [([env!("CARGO_PKG_VERSION")], 1u64)])?;
        let views = admin.registry.list();
        told.gauges(families::DRIVERS, driver_states(&views))?;
        let drivers = Drivers::of(admin);
        drivers.tell_wasm(&mut told)?;
        tell_node(admin, &mut told)?;
        tell_checkpoint(admin, &mut told)?;
        tell_claims(admin, &drivers, &mut told)?;
        told.gauges(families::PLUGINS, plugins(&views))?;
        tell_devices(admin, &mut told)?;
        tell_pod_resources(admin, &mut told)?;
        cluster::tell(admin.cluster.as_ref(), &mut told)
    }
}

/// Writes families, each once.
struct Told<'a>(DescriptorEncoder<'a>);

impl Told<'_> {
    fn each<const N: usize, L: ToString, V>(
        &mut self,
        family: Family,
        samples: impl IntoIterator<Item = ([L; N], V)>,
        write: impl Fn(&mut MetricEncoder<'_>, V) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut metric = self.0.encode_descriptor(family.name, family.help, None, family.kind.into())?;
        for (values, sample) in samples {
            debug_assert_eq!(family.labels.len(), N, "{}", family.name);
            let values = values.iter().map(L::to_string);
            let labels: Vec<(&str, String)> = family.labels.iter().copied().zip(values).collect();
            match labels.as_slice() {
                [] => write(&mut metric, sample)?,
                labels => write(&mut metric.encode_family(&labels)?, sample)?,
            }
        }
        Ok(())
    }

    /// A family that its owner counts with types of the library.
    fn metric(&mut self, family: Family, metric: Option<&impl EncodeMetric>) -> Result<(), Error> {
        let encoder = self.0.encode_descriptor(family.name, family.help, None, family.kind.into())?;
        metric.map_or(Ok(()), |metric| metric.encode(encoder))
    }

    fn counters<const N: usize, L: ToString, V: EncodeCounterValue>(
        &mut self,
        family: Family,
        samples: impl IntoIterator<Item = ([L; N], V)>,
    ) -> Result<(), Error> {
        self.each(family, samples, |metric, value| metric.encode_counter::<NoLabelSet, _, u64>(&value, None))
    }

    fn gauges<const N: usize, L: ToString, V: EncodeGaugeValue>(
        &mut self,
        family: Family,
        samples: impl IntoIterator<Item = ([L; N], V)>,
    ) -> Result<(), Error> {
        self.each(family, samples, |metric, value| metric.encode_gauge(&value))
    }

    fn histograms<const N: usize, L: ToString>(
        &mut self,
        family: Family,
        samples: impl IntoIterator<Item = ([L; N], HistogramView)>,
    ) -> Result<(), Error> {
        self.each(family, samples, |metric, view| {
            let bounds = view.bounds.iter().copied().chain([f64::INFINITY]);
            let buckets: Vec<_> = bounds.zip(view.counts.iter().copied()).collect();
            metric.encode_histogram::<NoLabelSet>(view.sum, view.count(), &buckets, None)
        })
    }
}

/// For a family without labels.
const NO_LABELS: [&str; 0] = [];

/// How many sources of a driver are in a state.
fn driver_states(views: &[DriverView]) -> Vec<([String; 3], u64)> {
    let mut counts = BTreeMap::new();
    for view in views {
        if let Some(name) = &view.name {
            let labels = [name.to_string(), view.kind.as_str().to_owned(), view.state.as_str().to_owned()];
            *counts.entry(labels).or_insert(0) += 1;
        }
    }
    counts.into_iter().collect()
}

/// As a kubelet counts its plugins: a socket is wanted, and is there when it is registered.
fn plugins(views: &[DriverView]) -> Vec<([String; 2], u64)> {
    let natives = views.iter().filter(|view| view.kind == DriverKind::Grpc);
    let each = natives.flat_map(|view| {
        let told = |state: &str| ([view.source.clone(), state.to_owned()], 1);
        let registered = !matches!(view.state, DriverState::Seen | DriverState::Failed);
        [Some(told("desired_state_of_world")), registered.then(|| told("actual_state_of_world"))]
    });
    each.flatten().collect()
}

/// What the drivers that serve have counted.
struct Drivers {
    wasm: Vec<(String, Box<Stats>)>,
    native: Vec<(String, Vec<RpcSeconds>)>,
}

impl Drivers {
    fn of(admin: &Admin) -> Self {
        let (mut wasm, mut native) = (Vec::new(), Vec::new());
        for (name, stats) in admin.registry.stats() {
            match stats {
                DriverStats::Wasm(stats) => wasm.push((name.to_string(), stats)),
                DriverStats::Grpc(rpcs) => native.push((name.to_string(), rpcs)),
            }
        }
        Self { wasm, native }
    }

    /// One number of each driver.
    fn each<V>(&self, number: impl Fn(&Stats) -> V) -> Vec<([&str; 1], V)> {
        self.wasm.iter().map(|(name, stats)| ([name.as_str()], number(stats))).collect()
    }

    fn tell_wasm(&self, told: &mut Told<'_>) -> Result<(), Error> {
        self.tell_calls(told)?;
        told.counters(families::CPU, self.each(|stats| stats.cpu.as_secs_f64()))?;
        told.gauges(families::PEAK_CPU, self.each(|stats| stats.peak.cpu.as_secs_f64()))?;
        told.gauges(families::PEAK_MEMORY, self.each(|stats| stats.peak.memory))?;
        told.gauges(families::PEAK_TABLES, self.each(|stats| stats.peak.table_elements))?;
        told.gauges(families::PEAK_HOST_BYTES, self.each(|stats| stats.peak.host_bytes))?;
        told.gauges(families::PEAK_HOST_OPERATIONS, self.each(|stats| stats.peak.host_operations))?;
        told.counters(families::TRAPS, self.each(|stats| stats.ended(Outcome::Trap)))?;
        let limits = self.wasm.iter().flat_map(|(name, stats)| {
            stats.limits.iter().map(move |(limit, count)| ([name.as_str(), limit.as_str()], *count))
        });
        told.counters(families::LIMITS, limits)?;
        told.counters(families::REFUSED, self.each(|stats| stats.answers_refused))?;
        told.counters(families::LOG_LINES, self.each(|stats| stats.log_lines))?;
        told.counters(families::LOG_DROPPED, self.each(Stats::log_lines_dropped))?;
        told.counters(families::HOST_BYTES, self.each(|stats| stats.host_bytes))?;
        told.counters(families::HOST_OPERATIONS, self.each(|stats| stats.host_operations))
    }

    fn tell_calls(&self, told: &mut Told<'_>) -> Result<(), Error> {
        let calls = self.wasm.iter().flat_map(|(name, stats)| {
            stats.operations.iter().flat_map(move |(operation, calls)| {
                let labels = move |outcome: &Outcome| [name.as_str(), operation.as_str(), outcome.as_str()];
                calls.outcomes.iter().map(move |(outcome, count)| (labels(outcome), *count))
            })
        });
        told.counters(families::CALLS, calls)?;
        let seconds = self.wasm.iter().flat_map(|(name, stats)| {
            let each = stats.operations.iter();
            each.map(move |(operation, calls)| ([name.as_str(), operation.as_str()], calls.latency.clone()))
        });
        told.histograms(families::CALL_SECONDS, seconds)
    }
}

fn tell_node(admin: &Admin, told: &mut Told<'_>) -> Result<(), Error> {
    let mut claims: BTreeMap<_, u64> = [ClaimState::Preparing, ClaimState::Prepared, ClaimState::Unpreparing]
        .map(|s| ([s.as_str()], 0))
        .into();
    for claim in admin.manager.claims() {
        *claims.entry([claim.state.as_str()]).or_default() += 1;
    }
    told.gauges(families::CLAIMS, claims)?;
    told.gauges(families::PODS, [(NO_LABELS, admin.manager.pods_count())])?;
    let mut conditions: BTreeMap<[String; 1], u64> = BTreeMap::new();
    for condition in admin.conditions.list() {
        *conditions.entry([condition.problem.code]).or_default() += 1;
    }
    told.gauges(families::CONDITIONS, conditions)?;
    told.counters(families::CDI_AGAIN, [(NO_LABELS, admin.manager.claim_stats().files_rendered_again)])
}

fn tell_checkpoint(admin: &Admin, told: &mut Told<'_>) -> Result<(), Error> {
    let (stats, distributions) = (admin.checkpoint.stats(), admin.checkpoint.distributions());
    told.counters(families::COMMITS, [(["durable"], stats.commits), (["failed"], stats.failed_commits)])?;
    told.histograms(families::COMMIT_CHANGES, [(NO_LABELS, distributions.changes)])?;
    told.histograms(families::COMMIT_SECONDS, [(NO_LABELS, distributions.seconds)])?;
    told.counters(families::COMMIT_BYTES, [(NO_LABELS, stats.value_bytes)])
}

fn tell_claims(admin: &Admin, drivers: &Drivers, told: &mut Told<'_>) -> Result<(), Error> {
    let stats = admin.manager.claim_stats();
    let operations = [("PrepareResources", stats.prepares), ("UnprepareResources", stats.unprepares)];
    let operations = operations
        .into_iter()
        .flat_map(|(operation, [good, bad])| [([operation, "false"], good), ([operation, "true"], bad)]);
    told.histograms(families::DRA_OPERATIONS, operations)?;
    let rpcs = drivers.native.iter().flat_map(|(name, rpcs)| {
        rpcs.iter().map(move |rpc| ([name.as_str(), rpc.method, rpc.code], rpc.seconds.clone()))
    });
    told.histograms(families::DRA_RPCS, rpcs)?;
    let mut in_use: BTreeMap<[String; 1], u64> = BTreeMap::from([(["<any>".to_owned()], 0)]);
    for claim in admin.manager.claims().iter().filter(|claim| claim.state == ClaimState::Prepared) {
        let drivers = claim.drivers.keys().map(ToString::to_string).chain(["<any>".to_owned()]);
        drivers.for_each(|driver| *in_use.entry([driver]).or_default() += 1);
    }
    told.gauges(families::DRA_CLAIMS, in_use)
}

fn tell_devices(admin: &Admin, told: &mut Told<'_>) -> Result<(), Error> {
    let stats = admin.manager.device_stats();
    let registrations = stats.registrations.into_iter().map(|(resource, count)| ([resource], count));
    told.counters(families::REGISTRATIONS, registrations)?;
    let allocations = stats.allocations.into_iter().map(|(resource, seconds)| ([resource], seconds));
    told.histograms(families::ALLOCATIONS, allocations)
}

fn tell_pod_resources(admin: &Admin, told: &mut Told<'_>) -> Result<(), Error> {
    let counters = &admin.pod_resources;
    let [list, old_list, allocatable, get, errors] = [
        &counters.list,
        &counters.list_v1alpha1,
        &counters.get_allocatable,
        &counters.get,
        &counters.get_errors,
    ]
    .map(|count| count.load(Relaxed));
    let (v1, v1alpha1) = (["v1"], ["v1alpha1"]);
    told.counters(families::POD_RESOURCES, [(v1, list + allocatable + get), (v1alpha1, old_list)])?;
    told.counters(families::POD_RESOURCES_LIST, [(v1, list), (v1alpha1, old_list)])?;
    told.counters(families::POD_RESOURCES_ALLOCATABLE, [(v1, allocatable)])?;
    told.counters(families::POD_RESOURCES_GET, [(v1, get)])?;
    told.counters(families::POD_RESOURCES_GET_ERRORS, [(v1, errors)])
}
