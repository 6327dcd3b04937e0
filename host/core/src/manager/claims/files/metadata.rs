//! Metadata files of claims, which live and die with the claims' CDI files: written before an answer, repaired by the periodic check,
//! removed when the claim is unprepared.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::SpecFiles;
use crate::device_metadata::{self, FileName, MetadataDir, MetadataFile, MetadataSettings};
use crate::manager::claims::machine::DriverResult;
use crate::registry::Registry;
use nodedock_base::error::chain;
use nodedock_model::{ClaimRecord, DriverName, Problem, ProblemCode, Uid};

impl SpecFiles {
    /// Adds metadata to the results of a claim's drivers. A claim that cannot have any is refused: it would be started without.
    pub(in crate::manager::claims) fn with_metadata(
        &self,
        registry: &Registry,
        record: &ClaimRecord,
        mut results: Vec<DriverResult>,
    ) -> Vec<DriverResult> {
        for result in &mut results {
            let Ok(prepared) = &mut result.outcome else {
                continue;
            };
            let serving = registry.serving(&result.driver).ok();
            let published = serving.and_then(|driver| Some(driver.inventory?.borrow().clone()));
            let inventory = published.as_ref().map(|published| &published.inventory);
            let settings = &self.settings.metadata;
            let added = device_metadata::add(record, &result.driver, prepared, inventory, settings);
            if let Err(error) = added {
                result.outcome = Err(error.into());
            }
        }
        results
    }

    /// Writes the files that are missing or differ from the checkpoint. Returns the claims for which that failed.
    pub(super) fn write_metadata(&self, records: &[Arc<ClaimRecord>]) -> BTreeMap<Uid, Problem> {
        let mut failed = BTreeMap::new();
        for record in records {
            for file in wrong_files(&self.metadata, &self.settings.metadata, record) {
                if let Err(error) = self.metadata.write(&file) {
                    failed.insert(record.id.uid.clone(), not_written(record, &error));
                }
            }
        }
        failed
    }

    /// Removes the files of a claim's drivers. One that stays is removed by the periodic check.
    pub(super) fn remove_metadata<'a>(
        &self,
        record: &ClaimRecord,
        drivers: impl IntoIterator<Item = &'a DriverName>,
    ) {
        let names = drivers
            .into_iter()
            .flat_map(|driver| device_metadata::names(record, driver));
        names.for_each(|name| self.remove_metadata_file(&name));
    }

    fn remove_metadata_file(&self, name: &FileName) {
        if let Err(error) = self.metadata.remove(name) {
            let (driver, claim) = (&name.driver, &name.claim);
            tracing::warn!(%driver, %claim, error = chain(&error), "a metadata file of a claim stays");
        }
    }

    /// Removes files that belong to no claim.
    pub(super) fn remove_metadata_orphans(&self) {
        let listed = match self.metadata.list() {
            Ok(listed) => listed,
            Err(error) => {
                return tracing::warn!(error = chain(&error), "metadata files not listed");
            }
        };
        for name in listed {
            let (driver, claim) = (&name.driver, &name.claim);
            // Under its claim's lock: a pod may just be requesting it.
            let lock = self.records.try_lock_claim(claim);
            if lock.is_some() && !self.records.has_part(claim, driver) {
                tracing::info!(%claim, %driver, "removing a metadata file that no claim owns");
                self.remove_metadata_file(&name);
            }
        }
    }
}

/// Returns the files of a claim that are missing or differ from the checkpoint.
pub(super) fn wrong_files(
    directory: &MetadataDir,
    settings: &MetadataSettings,
    record: &ClaimRecord,
) -> Vec<MetadataFile> {
    let mut files = device_metadata::render(record, settings);
    files.retain(|file| !directory.is_current(file));
    files
}

fn not_written(record: &ClaimRecord, error: &io::Error) -> Problem {
    let message = format!(
        "write the metadata files of claim {}: {}",
        record.id,
        chain(error)
    );
    Problem::unavailable(ProblemCode::MetadataNotWritten, message)
}
