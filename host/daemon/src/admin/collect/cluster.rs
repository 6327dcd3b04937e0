//! The families of a Kubernetes node: the bridge to its kubelet, and what is written to the API server. Elsewhere they have no samples.

use std::fmt;

use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::super::{Cluster, families};
use super::Exposition;
use nodedock_kube::bridge::Registration;
use nodedock_kube::client::Reachability;
use nodedock_kube::slices::PoolStatus;

pub(super) fn encode(cluster: Option<&Cluster>, out: &mut Exposition<'_>) -> fmt::Result {
    encode_bridge(cluster, out)?;
    encode_resources(cluster, out)?;
    encode_requests(cluster, out)?;
    encode_slices(cluster, out)?;
    encode_claims(cluster, out)
}

fn encode_bridge(cluster: Option<&Cluster>, out: &mut Exposition<'_>) -> fmt::Result {
    let metrics = cluster.map(|cluster| cluster.bridge.metrics());
    let drivers = cluster
        .into_iter()
        .flat_map(|cluster| cluster.bridge.drivers())
        .map(|status| {
            let registration = match status.registration {
                Registration::Offered => "offered",
                Registration::Asked => "asked",
                Registration::Registered => "registered",
                Registration::Refused(_) => "refused",
            };
            ([status.driver.to_string(), registration.to_owned()], 1)
        });
    out.gauges(families::BRIDGE_DRIVERS, drivers)?;
    out.metric(
        families::BRIDGE_REGISTRATIONS,
        metrics.map(|metrics| &metrics.registrations),
    )?;
    let connections = metrics.map(|metrics| metrics.connections());
    out.metric(
        families::BRIDGE_OPEN,
        connections.map(|[open, _]| ConstGauge::new(open)).as_ref(),
    )?;
    out.metric(
        families::BRIDGE_CONNECTIONS,
        connections
            .map(|[_, made]| ConstCounter::new(made))
            .as_ref(),
    )?;
    out.metric(
        families::BRIDGE_IN_FLIGHT,
        metrics.map(|metrics| &metrics.calls_in_flight),
    )?;
    out.metric(
        families::BRIDGE_CALLS,
        metrics.map(|metrics| &metrics.calls),
    )?;
    out.metric(
        families::BRIDGE_OPERATIONS,
        metrics.map(|metrics| &metrics.operations),
    )
}

fn encode_resources(cluster: Option<&Cluster>, out: &mut Exposition<'_>) -> fmt::Result {
    let metrics = cluster.map(|cluster| cluster.bridge.metrics());
    let statuses = cluster
        .into_iter()
        .flat_map(|cluster| cluster.bridge.resources());
    let devices = statuses.flat_map(|status| {
        let unhealthy = status.devices.saturating_sub(status.healthy);
        [("healthy", status.healthy), ("unhealthy", unhealthy)].map(|(health, count)| {
            (
                [status.resource.to_string(), health.to_owned()],
                count as u64,
            )
        })
    });
    out.gauges(families::RESOURCE_DEVICES, devices)?;
    out.metric(
        families::RESOURCE_REGISTRATIONS,
        metrics.map(|metrics| &metrics.resource_registrations),
    )?;
    out.metric(
        families::RESOURCE_LISTS,
        metrics.map(|metrics| &metrics.lists),
    )?;
    out.metric(
        families::RESOURCE_ALLOCATIONS,
        metrics.map(|metrics| &metrics.allocations),
    )?;
    out.metric(
        families::RESOURCE_FAILURES,
        metrics.map(|metrics| &metrics.allocation_failures),
    )?;
    out.metric(
        families::RESOURCE_LOOKS,
        metrics.map(|metrics| &metrics.in_use_looks),
    )?;
    out.metric(
        families::RESOURCE_RELEASED,
        metrics.map(|metrics| &metrics.released),
    )
}

fn encode_requests(cluster: Option<&Cluster>, out: &mut Exposition<'_>) -> fmt::Result {
    let metrics = cluster.map(|cluster| cluster.client.metrics());
    let reachable =
        cluster.map(|cluster| *cluster.client.reachability().borrow() == Reachability::Reachable);
    out.metric(
        families::API_REACHABLE,
        reachable.map(|is| ConstGauge::new(u64::from(is))).as_ref(),
    )?;
    out.metric(
        families::API_REQUESTS,
        metrics.map(|metrics| &metrics.requests),
    )?;
    out.metric(
        families::API_SECONDS,
        metrics.map(|metrics| &metrics.seconds),
    )?;
    out.metric(families::API_WAITS, metrics.map(|metrics| &metrics.waits))?;
    out.metric(
        families::API_RETRIES,
        metrics.map(|metrics| &metrics.retries),
    )?;
    out.metric(
        families::API_WATCHES,
        metrics.map(|metrics| &metrics.watch_restarts),
    )
}

fn encode_slices(cluster: Option<&Cluster>, out: &mut Exposition<'_>) -> fmt::Result {
    let pools = cluster
        .map(|cluster| cluster.slices.pools())
        .unwrap_or_default();
    let each = |number: fn(&PoolStatus) -> u64| {
        pools
            .iter()
            .map(move |(key, status)| ([key.driver.as_str(), key.pool.as_str()], number(status)))
    };
    out.gauges(families::SLICES, each(|status| status.slices as u64))?;
    out.gauges(
        families::SLICE_DEVICES,
        each(|status| status.devices as u64),
    )?;
    out.gauges(
        families::SLICE_GENERATION,
        each(|status| u64::try_from(status.generation).unwrap_or_default()),
    )?;
    out.gauges(
        families::SLICES_CURRENT,
        each(|status| u64::from(status.is_current)),
    )?;
    out.metric(
        families::SLICE_WRITES,
        cluster.map(|cluster| &cluster.slices.writes),
    )?;
    out.metric(
        families::SLICE_REPAIRS,
        cluster.map(|cluster| &cluster.slices.repairs),
    )
}

fn encode_claims(cluster: Option<&Cluster>, out: &mut Exposition<'_>) -> fmt::Result {
    let reads = cluster
        .map(|cluster| cluster.claims.counts())
        .into_iter()
        .flat_map(|counts| {
            [
                (["memory"], counts.from_cache.clone()),
                (["server"], counts.from_server.clone()),
                (["memory-while-away"], counts.while_unreachable.clone()),
            ]
        });
    out.samples(families::CLAIM_READS, reads)?;
    let known = cluster.into_iter().flat_map(|cluster| {
        let [cached, watched] = cluster.claims.cached();
        [(["known"], cached as u64), (["followed"], watched as u64)]
    });
    out.gauges(families::CLAIMS_KNOWN, known)?;
    let statuses = cluster
        .map(|cluster| &cluster.statuses.counts)
        .into_iter()
        .flat_map(|counts| {
            [
                (["written"], counts.written.clone()),
                (["standing"], counts.unchanged.clone()),
                (["refused"], counts.refused.clone()),
                (["dropped"], counts.dropped.clone()),
            ]
        });
    out.samples(families::CLAIM_STATUSES, statuses)?;
    let events = cluster
        .into_iter()
        .flat_map(|cluster| cluster.events.counts());
    let events = events.map(|(outcome, count)| ([outcome], ConstCounter::new(count)));
    out.samples(families::EVENTS, events)?;
    let reconcile = cluster.map(|cluster| &cluster.reconcile.counts);
    let rounds = reconcile.into_iter().flat_map(|counts| {
        [
            (["seen"], counts.seen.clone()),
            (["blind"], counts.blind.clone()),
        ]
    });
    out.samples(families::RECONCILES, rounds)?;
    out.metric(
        families::RECONCILE_UNPREPARED,
        reconcile.map(|counts| &counts.unprepared),
    )
}
