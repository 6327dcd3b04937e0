//! Records of one kind whose owner writes its whole state: the checkpoint gets what differs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Change, Checkpoint, CommitError};
use nodedock_model::{AdapterRecord, DriverOffer, ResourceOffer};

/// A record that is put and deleted by itself.
pub trait StoredRecord: Clone + PartialEq {
    fn put(&self) -> Change;

    fn delete(&self) -> Change;
}

impl StoredRecord for AdapterRecord {
    fn put(&self) -> Change {
        Change::PutAdapter(Arc::new(self.clone()))
    }

    fn delete(&self) -> Change {
        Change::DeleteAdapter(self.key())
    }
}

impl StoredRecord for DriverOffer {
    fn put(&self) -> Change {
        Change::PutDriverOffer(Arc::new(self.clone()))
    }

    fn delete(&self) -> Change {
        Change::DeleteDriverOffer(self.key())
    }
}

impl StoredRecord for ResourceOffer {
    fn put(&self) -> Change {
        Change::PutResourceOffer(Arc::new(self.clone()))
    }

    fn delete(&self) -> Change {
        Change::DeleteResourceOffer(self.key())
    }
}

/// The records of one kind, as the checkpoint has them.
pub struct StoredRecords<K, R> {
    checkpoint: Checkpoint,
    records: BTreeMap<K, R>,
    /// Records that the last commit was to put or delete, unless it succeeded: its caller may have been cancelled before it was durable.
    in_doubt: BTreeMap<K, R>,
}

impl<K: Ord + Clone, R: StoredRecord> StoredRecords<K, R> {
    /// `records`: those that were read when the checkpoint was opened. Unreadable ones are not among them, and stay.
    pub fn new(checkpoint: Checkpoint, records: BTreeMap<K, R>) -> Self {
        Self {
            checkpoint,
            records,
            in_doubt: BTreeMap::new(),
        }
    }

    pub fn records(&self) -> &BTreeMap<K, R> {
        &self.records
    }

    /// Returns whether the checkpoint has exactly these records.
    pub fn has(&self, records: &BTreeMap<K, R>) -> bool {
        self.in_doubt.is_empty() && self.records == *records
    }

    /// Makes the records durable, all of them or none: puts those that differ, and deletes those that are missing. Without a difference
    /// nothing is written.
    pub async fn save(&mut self, now: &BTreeMap<K, R>) -> Result<(), CommitError> {
        let changed: Vec<_> = now
            .iter()
            .filter(|(key, record)| {
                self.in_doubt.contains_key(*key) || self.records.get(*key) != Some(*record)
            })
            .map(|(key, record)| (key.clone(), record.clone()))
            .collect();
        let gone: Vec<_> = self
            .records
            .iter()
            .chain(&self.in_doubt)
            .filter(|(key, _)| !now.contains_key(*key))
            .map(|(key, record)| (key.clone(), record.clone()))
            .collect();
        let puts = changed.iter().map(|(_, record)| record.put());
        let deletes = gone.iter().map(|(_, record)| record.delete());
        let changes = puts.chain(deletes).collect();
        self.in_doubt.extend(changed.into_iter().chain(gone));
        self.checkpoint.commit(changes).await?;
        self.in_doubt.clear();
        self.records.clone_from(now);
        Ok(())
    }
}
