//! What a Kubernetes node counts besides: the bridge to its kubelet, and what is written to the API server. Elsewhere these families
//! have no samples.

use std::fmt::Error;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::super::{Cluster, families};
use super::{NO_LABELS, Told};
use nodedock_kube::bridge::Registration;
use nodedock_kube::client::Reachability;

pub(super) fn tell(cluster: Option<&Cluster>, told: &mut Told<'_>) -> Result<(), Error> {
    tell_bridge(cluster, told)?;
    tell_resources(cluster, told)?;
    tell_api(cluster, told)?;
    tell_slices(cluster, told)?;
    tell_claims(cluster, told)
}

/// A family's samples, where there are any.
fn of<T, S>(cluster: Option<&Cluster>, samples: impl FnOnce(&Cluster) -> T) -> impl Iterator<Item = S>
where
    T: IntoIterator<Item = S>,
{
    cluster.map(samples).into_iter().flatten()
}

fn tell_bridge(cluster: Option<&Cluster>, told: &mut Told<'_>) -> Result<(), Error> {
    let metrics = cluster.map(|cluster| cluster.bridge.metrics());
    let drivers = of(cluster, |cluster| {
        let statuses = cluster.bridge.drivers().into_iter();
        statuses.map(|status| ([status.driver.to_string(), word(&status.registration).to_owned()], 1u64))
    });
    told.gauges(families::BRIDGE_DRIVERS, drivers)?;
    told.metric(families::BRIDGE_REGISTRATIONS, metrics.map(|metrics| &metrics.registrations))?;
    let connections = metrics.map(|metrics| metrics.connections());
    told.gauges(families::BRIDGE_OPEN, connections.map(|[open, _]| (NO_LABELS, open)))?;
    told.counters(families::BRIDGE_CONNECTIONS, connections.map(|[_, made]| (NO_LABELS, made)))?;
    told.metric(families::BRIDGE_IN_FLIGHT, metrics.map(|metrics| &metrics.calls_in_flight))?;
    told.metric(families::BRIDGE_CALLS, metrics.map(|metrics| &metrics.calls))?;
    told.metric(families::BRIDGE_OPERATIONS, metrics.map(|metrics| &metrics.operations))
}

fn word(registration: &Registration) -> &'static str {
    match registration {
        Registration::Offered => "offered",
        Registration::Asked => "asked",
        Registration::Registered => "registered",
        Registration::Refused(_) => "refused",
    }
}

fn tell_resources(cluster: Option<&Cluster>, told: &mut Told<'_>) -> Result<(), Error> {
    let metrics = cluster.map(|cluster| cluster.bridge.metrics());
    let devices = of(cluster, |cluster| {
        let statuses = cluster.bridge.resources().into_iter();
        statuses.flat_map(|status| {
            let of =
                |health: &str, count: usize| ([status.resource.to_string(), health.to_owned()], count as u64);
            [of("healthy", status.healthy), of("unhealthy", status.devices.saturating_sub(status.healthy))]
        })
    });
    told.gauges(families::RESOURCE_DEVICES, devices)?;
    let registrations = metrics.map(|metrics| &metrics.resource_registrations);
    told.metric(families::RESOURCE_REGISTRATIONS, registrations)?;
    told.metric(families::RESOURCE_LISTS, metrics.map(|metrics| &metrics.lists))?;
    told.metric(families::RESOURCE_ALLOCATIONS, metrics.map(|metrics| &metrics.allocations))?;
    told.metric(families::RESOURCE_FAILURES, metrics.map(|metrics| &metrics.allocation_failures))?;
    told.metric(families::RESOURCE_LOOKS, metrics.map(|metrics| &metrics.in_use_looks))?;
    told.metric(families::RESOURCE_GIVEN_UP, metrics.map(|metrics| &metrics.released))
}

fn tell_api(cluster: Option<&Cluster>, told: &mut Told<'_>) -> Result<(), Error> {
    let counts = cluster.map(|cluster| cluster.client.counts());
    let counts = counts.as_ref();
    let reachable =
        cluster.map(|cluster| u64::from(*cluster.client.reachability().borrow() == Reachability::Reachable));
    told.gauges(families::API_REACHABLE, reachable.map(|here| (NO_LABELS, here)))?;
    let requests = counts.into_iter().flat_map(|counts| &counts.requests);
    let requests = requests.map(|(verb, resource, code, count)| {
        ([verb.as_str().to_owned(), (*resource).to_owned(), code.to_string()], *count)
    });
    told.counters(families::API_REQUESTS, requests)?;
    told.histograms(families::API_SECONDS, counts.map(|counts| (NO_LABELS, counts.seconds.clone())))?;
    told.histograms(families::API_WAITS, counts.map(|counts| (NO_LABELS, counts.waits.clone())))?;
    told.counters(families::API_RETRIES, counts.map(|counts| (NO_LABELS, counts.retries)))?;
    told.counters(families::API_WATCHES, counts.map(|counts| (NO_LABELS, counts.watch_restarts)))
}

fn tell_slices(cluster: Option<&Cluster>, told: &mut Told<'_>) -> Result<(), Error> {
    let pools = cluster.map(|cluster| cluster.slices.pools()).unwrap_or_default();
    let each = |number: fn(&nodedock_kube::slices::PoolStatus) -> u64| {
        pools.iter().map(move |(key, status)| ([key.driver.as_str(), key.pool.as_str()], number(status)))
    };
    told.gauges(families::SLICES, each(|status| status.slices as u64))?;
    told.gauges(families::SLICE_DEVICES, each(|status| status.devices as u64))?;
    told.gauges(
        families::SLICE_GENERATION,
        each(|status| u64::try_from(status.generation).unwrap_or_default()),
    )?;
    told.gauges(families::SLICES_CURRENT, each(|status| u64::from(status.is_current)))?;
    let writes = of(cluster, |cluster| cluster.slices.writes());
    let writes = writes.map(|(verb, outcome, count)| ([verb.as_str(), outcome.as_str()], count));
    told.counters(families::SLICE_WRITES, writes)?;
    told.counters(families::SLICE_REPAIRS, cluster.map(|cluster| (NO_LABELS, cluster.slices.repairs())))
}

fn tell_claims(cluster: Option<&Cluster>, told: &mut Told<'_>) -> Result<(), Error> {
    let counts = cluster.map(|cluster| cluster.claims.counts());
    let answers = counts.into_iter().flat_map(|counts| {
        [
            (["memory"], counts.from_cache),
            (["server"], counts.from_server),
            (["memory-while-away"], counts.while_unreachable),
        ]
    });
    told.counters(families::CLAIM_READS, answers)?;
    let known =
        counts.into_iter().flat_map(|counts| [(["known"], counts.cached), (["followed"], counts.watched)]);
    told.gauges(families::CLAIMS_KNOWN, known)?;
    let statuses = of(cluster, |cluster| {
        let counts = cluster.statuses.counts();
        let each = [
            ("written", &counts.written),
            ("standing", &counts.unchanged),
            ("refused", &counts.refused),
            ("dropped", &counts.dropped),
        ];
        each.map(|(outcome, count)| ([outcome], read(count)))
    });
    told.counters(families::CLAIM_STATUSES, statuses)?;
    let events = of(cluster, |cluster| {
        let counts = cluster.events.counts();
        [
            (["created"], counts.created),
            (["updated"], counts.updated),
            (["refused"], counts.refused),
            (["dropped"], counts.dropped),
        ]
    });
    told.counters(families::EVENTS, events)?;
    let counts = cluster.map(|cluster| cluster.reconcile.counts());
    let rounds = counts.into_iter().flat_map(|counts| {
        let blind = read(&counts.blind);
        [(["seen"], read(&counts.rounds).saturating_sub(blind)), (["blind"], blind)]
    });
    told.counters(families::RECONCILES, rounds)?;
    told.counters(families::RECONCILE_GIVEN_UP, counts.map(|counts| (NO_LABELS, read(&counts.unprepared))))
}

fn read(count: &AtomicU64) -> u64 {
    count.load(Relaxed)
}
