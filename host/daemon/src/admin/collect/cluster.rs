//! What a Kubernetes node counts besides: the bridge to its kubelet, and what is written to the API server. Elsewhere these families
//! have no samples.

use std::fmt::Error;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::super::{Cluster, families};
use super::{NO_LABELS, Told};
use nodedock_kube::api::Reach;
use nodedock_kube::bridge::Registration;

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
    let view = cluster.map(|cluster| cluster.bridge.counters().view());
    let view = view.as_ref();
    let drivers = of(cluster, |cluster| {
        let statuses = cluster.bridge.status().into_iter();
        statuses.map(|status| ([status.driver.to_string(), word(&status.registration).to_owned()], 1u64))
    });
    told.gauges(families::BRIDGE_DRIVERS, drivers)?;
    let registrations = view
        .into_iter()
        .flat_map(|view| [(["registered"], view.registrations), (["refused"], view.refusals)]);
    told.counters(families::BRIDGE_REGISTRATIONS, registrations)?;
    told.gauges(families::BRIDGE_OPEN, view.map(|view| (NO_LABELS, view.connections_open)))?;
    told.counters(families::BRIDGE_CONNECTIONS, view.map(|view| (NO_LABELS, view.connections)))?;
    told.gauges(families::BRIDGE_IN_FLIGHT, view.map(|view| (NO_LABELS, view.calls_in_flight)))?;
    let calls = view.into_iter().flat_map(|view| &view.calls);
    let calls = calls.map(|call| {
        let code = format!("{:?}", call.code);
        ([call.driver.to_string(), call.method.to_owned(), code], call.seconds.clone())
    });
    told.histograms(families::BRIDGE_CALLS, calls)?;
    let operations = view.into_iter().flat_map(|view| &view.operations);
    let operations = operations
        .map(|call| ([call.operation, if call.is_error { "true" } else { "false" }], call.seconds.clone()));
    told.histograms(families::BRIDGE_OPERATIONS, operations)
}

fn word(registration: &Registration) -> &'static str {
    match registration {
        Registration::Offered => "offered",
        Registration::Asked => "asked",
        Registration::Registered { .. } => "registered",
        Registration::Refused { .. } => "refused",
    }
}

fn tell_resources(cluster: Option<&Cluster>, told: &mut Told<'_>) -> Result<(), Error> {
    let counts = cluster.map(|cluster| cluster.plugins.counts());
    let counts = counts.as_ref();
    let each = || counts.into_iter().flat_map(|counts| &counts.resources);
    let devices = of(cluster, |cluster| {
        let statuses = cluster.plugins.status().into_iter();
        statuses.flat_map(|status| {
            let of =
                |health: &str, count: usize| ([status.resource.to_string(), health.to_owned()], count as u64);
            [of("healthy", status.healthy), of("unhealthy", status.devices.saturating_sub(status.healthy))]
        })
    });
    told.gauges(families::RESOURCE_DEVICES, devices)?;
    let registrations = each().flat_map(|of| {
        let outcome = |outcome: &'static str, count| ([of.resource.as_str(), outcome], count);
        [outcome("registered", of.registrations), outcome("refused", of.refusals)]
    });
    told.counters(families::RESOURCE_REGISTRATIONS, registrations)?;
    told.counters(families::RESOURCE_LISTS, each().map(|of| ([of.resource.as_str()], of.lists)))?;
    told.histograms(
        families::RESOURCE_ALLOCATIONS,
        each().map(|of| ([of.resource.as_str()], of.allocations.clone())),
    )?;
    told.counters(families::RESOURCE_FAILURES, each().map(|of| ([of.resource.as_str()], of.failures)))?;
    let looks = counts.into_iter().flat_map(|counts| {
        [(["answered"], counts.looks.saturating_sub(counts.looks_failed)), (["failed"], counts.looks_failed)]
    });
    told.counters(families::RESOURCE_LOOKS, looks)?;
    told.counters(families::RESOURCE_GIVEN_UP, counts.map(|counts| (NO_LABELS, counts.given_up)))
}

fn tell_api(cluster: Option<&Cluster>, told: &mut Told<'_>) -> Result<(), Error> {
    let counts = cluster.map(|cluster| cluster.api.counts());
    let counts = counts.as_ref();
    let reachable = cluster.map(|cluster| u64::from(*cluster.api.reach().borrow() == Reach::Here));
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
            (["memory"], counts.from_memory),
            (["server"], counts.asked),
            (["memory-while-away"], counts.while_away),
        ]
    });
    told.counters(families::CLAIM_READS, answers)?;
    let known =
        counts.into_iter().flat_map(|counts| [(["known"], counts.known), (["followed"], counts.followed)]);
    told.gauges(families::CLAIMS_KNOWN, known)?;
    let statuses = of(cluster, |cluster| {
        let counts = cluster.statuses.counts();
        let each = [
            ("written", &counts.written),
            ("standing", &counts.standing),
            ("refused", &counts.refused),
            ("dropped", &counts.dropped),
        ];
        each.map(|(outcome, count)| ([outcome], read(count)))
    });
    told.counters(families::CLAIM_STATUSES, statuses)?;
    let events = of(cluster, |cluster| {
        let counts = cluster.events.counts();
        let written =
            [("created", &counts.created), ("updated", &counts.updated), ("refused", &counts.refused)];
        let written = written.map(|(outcome, count)| ([outcome], read(count)));
        written.into_iter().chain([(["dropped"], cluster.events.dropped())]).collect::<Vec<_>>()
    });
    told.counters(families::EVENTS, events)?;
    let counts = cluster.map(|cluster| cluster.reconcile.counts());
    let rounds = counts.into_iter().flat_map(|counts| {
        let blind = read(&counts.blind);
        [(["seen"], read(&counts.rounds).saturating_sub(blind)), (["blind"], blind)]
    });
    told.counters(families::RECONCILES, rounds)?;
    told.counters(families::RECONCILE_GIVEN_UP, counts.map(|counts| (NO_LABELS, read(&counts.given_up))))
}

fn read(count: &AtomicU64) -> u64 {
    count.load(Relaxed)
}
