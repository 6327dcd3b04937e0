//! What changes when the adapters are read again. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::adapted::Adapted;
use super::merge::RECORD;
use nodedock_model::{Adapter, AdapterRecord, ExtendedResource};

/// Changes of adapters, by resource. What is in none of them stays as it is.
pub(super) struct Plan {
    /// The records of all adapters, with these changes.
    pub(super) records: BTreeMap<ExtendedResource, AdapterRecord>,
    /// Adapters with other rules, paths, `enabled` or another source, and those that are in a file again.
    pub(super) rewritten: BTreeMap<ExtendedResource, (Adapter, String)>,
    /// Adapters that are in no file any more.
    pub(super) removed: BTreeSet<ExtendedResource>,
    pub(super) new: BTreeMap<ExtendedResource, Adapted>,
    /// Sources that name another driver or pool for their resource: a start changes these.
    pub(super) renamed: BTreeSet<String>,
}

impl Plan {
    /// `known`: the adapters as they are; `wanted`: as they are written.
    pub(super) fn new(
        known: &BTreeMap<ExtendedResource, Adapted>,
        mut wanted: BTreeMap<ExtendedResource, Adapted>,
    ) -> Self {
        let mut plan = Self {
            records: BTreeMap::new(),
            rewritten: BTreeMap::new(),
            removed: BTreeSet::new(),
            new: BTreeMap::new(),
            renamed: BTreeSet::new(),
        };
        for (resource, adapted) in known {
            let mut record = adapted.record.clone();
            match wanted.remove(resource) {
                // It may be in a file that cannot be read.
                Some(wanted) if wanted.source == RECORD && !wanted.is_removed => {}
                Some(wanted) if !wanted.is_removed => {
                    plan.rewrite(resource, adapted, wanted, &mut record);
                }
                _ if adapted.is_removed => {}
                _ => {
                    plan.removed.insert(resource.clone());
                }
            }
            plan.records.insert(resource.clone(), record);
        }
        for (resource, mut adapted) in wanted {
            adapted.is_settled = false;
            let record = &mut adapted.record;
            record.is_returned &= !record.enabled.unwrap_or(adapted.adapter.enabled);
            plan.records.insert(resource.clone(), record.clone());
            plan.new.insert(resource, adapted);
        }
        plan
    }

    fn rewrite(
        &mut self,
        resource: &ExtendedResource,
        known: &Adapted,
        wanted: Adapted,
        record: &mut AdapterRecord,
    ) {
        let Adapted {
            adapter, source, ..
        } = wanted;
        let names = |adapter: &Adapter| (adapter.driver.clone(), adapter.pool.clone());
        if names(&adapter) != names(&known.adapter) {
            self.renamed.insert(source);
            return;
        }
        if adapter == known.adapter && source == known.source && !known.is_removed {
            return;
        }
        record.paths = adapter.paths.as_ref().map(|paths| paths.texts().to_vec());
        record.rules.clone_from(&adapter.rules);
        // Slices may have its pool again.
        record.is_returned &= !record.enabled.unwrap_or(adapter.enabled);
        self.rewritten.insert(resource.clone(), (adapter, source));
    }
}
