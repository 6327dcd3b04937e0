//! Values that drivers change on the node: the recorder of previous values, and the audit log.

use std::collections::BTreeMap;

use async_trait::async_trait;

use nodedock_base::locks::LockGuard;
use nodedock_base::printable::printable;
use nodedock_model::{DriverName, ObjectRef, Problem, ProblemCode, Uid};

/// Log target of the audit: every value below `/sys` that is written, restored or refused.
pub const AUDIT: &str = "audit";
/// Bytes of a path or a value in an audit line.
const SHOWN_BYTES_MAX: usize = 512;

/// A write that a driver requests.
#[derive(Debug)]
pub struct Write<'a> {
    pub driver: &'a DriverName,
    /// Claims of the call; the host does not know for which of them the write is.
    pub claims: &'a [ObjectRef],
    /// Relative to `/sys`, without links.
    pub path: &'a str,
    pub inode: u64,
    /// Current value; `None`: it cannot be read, or cannot be written back.
    pub before: Option<&'a str>,
    pub value: &'a str,
}

/// Records the changes of a driver with the claims of its call.
#[async_trait]
pub trait Journal: Send + Sync {
    /// Locks a path for a write, from the read of the current value to the end of the write.
    async fn lock_path(&self, path: &str) -> Vec<LockGuard<String>>;

    /// Makes the intent of the write durable, with the previous value. Without it nothing is written.
    async fn intend(&self, write: &Write<'_>) -> Result<(), Problem>;

    /// Returns the value that a path had before the driver's first write for these claims, with the file's inode; `None` without a write,
    /// or if the value is unknown.
    fn before(
        &self,
        driver: &DriverName,
        claims: &[ObjectRef],
        path: &str,
    ) -> Option<(u64, String)>;

    /// Makes bytes durable that a driver saves in the middle of a prepare of the claim, instead of those saved before.
    async fn save_progress(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        progress: Vec<u8>,
    ) -> Result<(), Problem>;

    /// Returns what a driver saved last, by UID of the claim, for claims that no prepare has succeeded for since.
    fn progress(&self, driver: &DriverName) -> BTreeMap<Uid, Vec<u8>>;

    /// Records the outcome: the current value, or (`None`) that nothing was changed. Durable with the claim's next commit.
    fn settle(&self, write: &Write<'_>, stands: Option<String>);
}

/// A recorder that refuses every write, for inspecting drivers.
pub struct NoJournal;

#[async_trait]
impl Journal for NoJournal {
    async fn lock_path(&self, _path: &str) -> Vec<LockGuard<String>> {
        Vec::new()
    }

    async fn intend(&self, write: &Write<'_>) -> Result<(), Problem> {
        let message = format!(
            "/sys/{} is not written: its previous value cannot be recorded",
            write.path
        );
        Err(Problem::unavailable(ProblemCode::NotKept, message))
    }

    fn before(
        &self,
        _driver: &DriverName,
        _claims: &[ObjectRef],
        _path: &str,
    ) -> Option<(u64, String)> {
        None
    }

    async fn save_progress(
        &self,
        _: &DriverName,
        claim: &ObjectRef,
        _: Vec<u8>,
    ) -> Result<(), Problem> {
        let message = format!("the progress of claim {claim} cannot be recorded");
        Err(Problem::unavailable(ProblemCode::NotKept, message))
    }

    fn progress(&self, _: &DriverName) -> BTreeMap<Uid, Vec<u8>> {
        BTreeMap::new()
    }

    fn settle(&self, _write: &Write<'_>, _stands: Option<String>) {}
}

/// One line of the audit.
pub struct Audited<'a> {
    pub driver: &'a str,
    pub claims: &'a [ObjectRef],
    pub request: &'a str,
    pub path: &'a str,
    pub before: Option<&'a str>,
    pub after: Option<&'a str>,
    /// `written`, `put-back`, `left`, `refused` …
    pub outcome: &'a str,
    pub problem: Option<&'a Problem>,
}

impl Audited<'_> {
    /// Returns the approximate bytes of the line.
    pub fn bytes(&self) -> usize {
        let texts = [
            Some(self.path),
            self.before,
            self.after,
            self.problem.map(|p| p.message.as_str()),
        ];
        texts
            .into_iter()
            .flatten()
            .map(|text| text.len().min(SHOWN_BYTES_MAX))
            .sum::<usize>()
            + 128
    }

    /// Writes the line. `suppressed`: number of suppressed lines of the kind before it.
    pub fn tell(&self, suppressed: u64) {
        let claims: Vec<_> = self.claims.iter().map(|claim| claim.uid.as_str()).collect();
        let (driver, request, outcome, claims) =
            (self.driver, self.request, self.outcome, claims.join(","));
        let path = printable(self.path, SHOWN_BYTES_MAX);
        let (before, after) = (shown(self.before), shown(self.after));
        let suppressed = (suppressed > 0).then_some(suppressed);
        match self.problem {
            None => {
                tracing::info!(target: AUDIT, driver, claims, request, path, before, after, outcome, "value below /sys");
            }
            Some(problem) => {
                let (code, problem) = (
                    problem.code.as_str(),
                    printable(&problem.message, SHOWN_BYTES_MAX),
                );
                tracing::warn!(target: AUDIT, driver, claims, request, path, before, after, outcome, code, problem, suppressed, "value below /sys");
            }
        }
    }
}

fn shown(text: Option<&str>) -> Option<String> {
    text.map(|text| printable(text, SHOWN_BYTES_MAX))
}
