//! The adapters as they are written, with what the records know of them and of others. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::adapted::Adapted;
use super::{AdapterEntries, AdapterEntry, Claimed};
use nodedock_model::{
    Adapter, AdapterRecord, DriverKind, DriverName, ExtendedResource, PathPatterns, Problem,
    ProblemCode,
};

/// The source of an adapter that is in no file that counts.
pub(super) const RECORD: &str = "the record of adapters";

/// What decides which records without a file stay.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) has_kubelet: bool,
    /// At a start an adapter without a file ends if its devices are free. Later it acts as a disabled one.
    pub(super) is_start: bool,
}

/// The adapters, and the entries that do not count, by source.
pub(super) struct Merged {
    pub(super) adapted: BTreeMap<ExtendedResource, Adapted>,
    pub(super) conflicts: BTreeMap<String, Problem>,
}

/// Adapters by their resources: of two for a resource, or of one driver, the first counts, and a driver that the record has for a resource is
/// of no other one. One that is in the record alone stays while its driver has claims, until the kubelet's device manager has its pool, or
/// while a file cannot be read or is refused.
pub(super) fn merged(
    moment: Moment,
    entries: AdapterEntries,
    mut records: BTreeMap<ExtendedResource, AdapterRecord>,
    claimed: &Claimed,
) -> Merged {
    let AdapterEntries {
        entries,
        is_incomplete,
    } = entries;
    let mut adapted: BTreeMap<ExtendedResource, Adapted> = BTreeMap::new();
    let mut conflicts = BTreeMap::new();
    let has_claims =
        |driver: &DriverName| matches!(claimed.get(driver), Some(None | Some(DriverKind::Adapter)));
    let stays = |known: &AdapterRecord| {
        !moment.is_start
            || is_incomplete
            || has_claims(&known.driver)
            || (moment.has_kubelet && !known.is_returned)
    };
    let named: BTreeSet<_> = entries
        .iter()
        .map(|entry| entry.adapter.resource.clone())
        .collect();
    // Resources of drivers that the record has.
    let recorded: BTreeMap<_, _> = records
        .iter()
        .filter(|(resource, known)| named.contains(*resource) || stays(known))
        .map(|(resource, known)| (known.driver.clone(), resource.clone()))
        .collect();
    let mut refused = BTreeSet::new();
    for AdapterEntry {
        mut adapter,
        source,
    } in entries
    {
        let (resource, driver) = (adapter.resource.clone(), adapter.driver.clone());
        let has = format!("{source} has an adapter of {resource} for the driver {driver}");
        let other = adapted
            .values()
            .find(|known| known.adapter.resource == resource || known.adapter.driver == driver)
            .map(|other| {
                let (theirs, of, name) = (
                    &other.source,
                    &other.adapter.resource,
                    &other.adapter.driver,
                );
                format!("{has}, and {theirs} one of {of} for {name}: the first counts")
            });
        let before = recorded.get(&driver).filter(|of| **of != resource).map(|of| {
            format!(
                "{has}, which has been the driver of {of}: the adapter does not count before a start at which that is in no file and its devices are free"
            )
        });
        let foreign = (claimed.contains_key(&driver) && !has_claims(&driver)).then(|| {
            format!(
                "{has}, and claims were prepared by another driver of that name: the adapter does not count"
            )
        });
        if foreign.is_none() && (before.is_some() || other.is_some()) {
            refused.insert(resource.clone());
        }
        if let Some(message) = foreign.or(other).or(before) {
            conflicts.insert(source, conflict(message));
            continue;
        }
        let known = match records.remove(&resource) {
            Some(known) if (&known.driver, &known.pool) == (&driver, &adapter.pool) => known,
            Some(known) if has_claims(&known.driver) => {
                let message = format!(
                    "{source} has the driver {driver} with the pool {} for {resource}, and claims have devices of the driver {} with the pool {}: those stay until these claims are unprepared and the daemon is restarted",
                    adapter.pool, known.driver, known.pool
                );
                conflicts.insert(source.clone(), conflict(message));
                (adapter.driver, adapter.pool) = (known.driver.clone(), known.pool.clone());
                known
            }
            Some(known) => AdapterRecord {
                driver: driver.clone(),
                pool: adapter.pool.clone(),
                ..known
            },
            None => AdapterRecord::new(resource.clone(), driver.clone(), adapter.pool.clone()),
        };
        let paths = adapter.paths.as_ref().map(|paths| paths.texts().to_vec());
        let known = AdapterRecord {
            paths,
            rules: adapter.rules.clone(),
            ..known
        };
        adapted.insert(resource, Adapted::new(adapter, source, known, false));
    }
    for (resource, known) in records {
        let is_unread = is_incomplete || refused.contains(&resource);
        if !is_unread && !stays(&known) {
            continue;
        }
        let adapter = Adapter {
            resource: resource.clone(),
            driver: known.driver.clone(),
            pool: known.pool.clone(),
            enabled: !known.is_returned,
            rules: known.rules.clone(),
            paths: known
                .paths
                .clone()
                .and_then(|texts| PathPatterns::new(texts).ok()),
        };
        let source = RECORD.to_owned();
        adapted.insert(resource, Adapted::new(adapter, source, known, !is_unread));
    }
    Merged { adapted, conflicts }
}

fn conflict(message: String) -> Problem {
    Problem::conflict(ProblemCode::AdapterConflict, message)
}
