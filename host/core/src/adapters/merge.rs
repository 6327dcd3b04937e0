//! The adapters of a start: those of the files, with what the record knows of them and of others.

use std::collections::BTreeMap;

use super::adapted::Adapted;
use super::record::{AdapterRecord, Record};
use super::{AdapterEntries, AdapterEntry, AdapterParts};
use nodedock_model::{Adapter, DriverKind, DriverName, ExtendedResource, PathPatterns, Problem, ProblemCode};

/// Adapters by their resources: of two for a resource, or of one driver, the first counts. One that is in the record alone stays while its
/// driver has claims, until the kubelet's device manager has its pool, or while a file cannot be read.
pub(super) fn merged(
    parts: &AdapterParts,
    entries: AdapterEntries,
    mut record: Record,
    claimed: &BTreeMap<DriverName, Option<DriverKind>>,
) -> BTreeMap<ExtendedResource, Adapted> {
    let AdapterEntries { entries, is_incomplete } = entries;
    let mut adapted: BTreeMap<ExtendedResource, Adapted> = BTreeMap::new();
    let conflict = |source: &str, message: String| {
        parts.conditions.set(source, Problem::conflict(ProblemCode::AdapterConflict, message));
    };
    let has_claims =
        |driver: &DriverName| matches!(claimed.get(driver), Some(None | Some(DriverKind::Adapter)));
    for AdapterEntry { mut adapter, source } in entries {
        let (resource, driver) = (adapter.resource.clone(), adapter.driver.clone());
        let is_same = |known: &&Adapted| known.adapter.resource == resource || known.adapter.driver == driver;
        if let Some(other) = adapted.values().find(is_same) {
            let (theirs, of, name) = (&other.source, &other.adapter.resource, &other.adapter.driver);
            let message = format!(
                "{source} has an adapter of {resource} for the driver {driver}, and {theirs} one of {of} for {name}: the first counts"
            );
            conflict(&source, message);
            continue;
        }
        if claimed.contains_key(&driver) && !has_claims(&driver) {
            let message = format!(
                "{source} has an adapter of {resource} for the driver {driver}, and claims were prepared by another driver of that name: the adapter does not count"
            );
            conflict(&source, message);
            continue;
        }
        let paths = adapter.paths.as_ref().map(|paths| paths.texts().to_vec());
        let known = match record.adapters.remove(&resource) {
            Some(known) if (&known.driver, &known.pool) == (&driver, &adapter.pool) => known,
            Some(known) if has_claims(&known.driver) => {
                let message = format!(
                    "{source} has the driver {driver} with the pool {} for {resource}, and claims have devices of the driver {} with the pool {}: those stay until these claims are unprepared and the daemon is restarted",
                    adapter.pool, known.driver, known.pool
                );
                conflict(&source, message);
                (adapter.driver, adapter.pool) = (known.driver.clone(), known.pool.clone());
                known
            }
            Some(known) => AdapterRecord { driver: driver.clone(), pool: adapter.pool.clone(), ..known },
            None => AdapterRecord::new(driver.clone(), adapter.pool.clone()),
        };
        let known = AdapterRecord { paths, ..known };
        adapted.insert(resource, Adapted::new(adapter, source, known, false));
    }
    for (resource, known) in record.adapters {
        let is_taken = adapted.values().any(|other| other.adapter.driver == known.driver);
        let is_returned = known.is_returned || !parts.has_kubelet;
        if is_taken || (is_returned && !has_claims(&known.driver) && !is_incomplete) {
            continue;
        }
        tracing::warn!(%resource, driver = %known.driver, is_incomplete, "an adapter is in no file that could be read");
        let adapter = Adapter {
            resource: resource.clone(),
            driver: known.driver.clone(),
            pool: known.pool.clone(),
            enabled: !known.is_returned,
            rules: Vec::new(),
            paths: known.paths.clone().and_then(|texts| PathPatterns::new(texts).ok()),
        };
        let source = "the record of adapters".to_owned();
        adapted.insert(resource, Adapted::new(adapter, source, known, !is_incomplete));
    }
    adapted
}
