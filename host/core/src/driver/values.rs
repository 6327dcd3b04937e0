//! Values that drivers change on the node: who keeps what was there before, and what is logged of each change.

use async_trait::async_trait;

use nodedock_base::locks::Held;
use nodedock_base::printable::printable;
use nodedock_model::{DriverName, ObjectRef, Problem};

/// Target of the lines in the log that an auditor looks for: every value below `/sys` that is written, put back or refused.
pub const AUDIT: &str = "audit";
/// Bytes of a path or a value in such a line.
const SHOWN_BYTES_MAX: usize = 512;

/// A write that a driver is about to make.
#[derive(Debug)]
pub struct Write<'a> {
    pub driver: &'a DriverName,
    /// Claims of the call: nobody knows for which of them it is.
    pub claims: &'a [ObjectRef],
    /// Relative to `/sys`, without links.
    pub path: &'a str,
    pub inode: u64,
    /// What it reads as now; none: it cannot be read, or is nothing that could be written.
    pub before: Option<&'a str>,
    pub value: &'a str,
}

/// Keeps with the claims of a call what a driver changes.
#[async_trait]
pub trait Journal: Send + Sync {
    /// One write of a path at a time, whoever wants it: from the look at what is there to the end of the write.
    async fn turn(&self, path: &str) -> Vec<Held<String>>;

    /// Makes it durable that the write may happen, and what was there before. Without it nothing is written.
    async fn intend(&self, write: &Write<'_>) -> Result<(), Problem>;

    /// Notes what came of it: what it reads as now, or (none) that nothing was changed. Durable with the claim's next commit.
    fn settle(&self, write: &Write<'_>, stands: Option<String>);
}

/// Where nothing is kept, nothing is written: for looking at drivers.
pub struct NoJournal;

#[async_trait]
impl Journal for NoJournal {
    async fn turn(&self, _path: &str) -> Vec<Held<String>> {
        Vec::new()
    }

    async fn intend(&self, write: &Write<'_>) -> Result<(), Problem> {
        let message = format!("/sys/{} is not written: nobody keeps what was there before", write.path);
        Err(Problem::unavailable("not-kept", message))
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
    /// Bytes of the line, about.
    pub fn bytes(&self) -> usize {
        let texts = [Some(self.path), self.before, self.after, self.problem.map(|p| p.message.as_str())];
        texts.into_iter().flatten().map(|text| text.len().min(SHOWN_BYTES_MAX)).sum::<usize>() + 128
    }

    /// Writes it. `suppressed`: lines of the kind that were not written before it.
    pub fn tell(&self, suppressed: u64) {
        let shown = |text: Option<&str>| text.map(|text| printable(text, SHOWN_BYTES_MAX));
        let claims: Vec<_> = self.claims.iter().map(|claim| claim.uid.as_str()).collect();
        let (driver, request, outcome, claims) = (self.driver, self.request, self.outcome, claims.join(","));
        let path = printable(self.path, SHOWN_BYTES_MAX);
        let (before, after) = (shown(self.before), shown(self.after));
        let suppressed = (suppressed > 0).then_some(suppressed);
        match self.problem {
            None => {
                tracing::info!(target: AUDIT, driver, claims, request, path, before, after, outcome, "value below /sys");
            }
            Some(problem) => {
                let (code, problem) = (problem.code.as_str(), printable(&problem.message, SHOWN_BYTES_MAX));
                tracing::warn!(target: AUDIT, driver, claims, request, path, before, after, outcome, code, problem, suppressed, "value below /sys");
            }
        }
    }
}
