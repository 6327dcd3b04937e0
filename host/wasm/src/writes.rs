//! Writes below `/sys`: each within the grant and the ceiling, each durable as an intent before it happens, each in the audit.

use std::sync::Arc;

use super::hostcalls::{CallView, not_granted};
use super::limiter::Reached;
use super::sandbox::{Scope, State};
use super::stats::Limit;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::locks::Held;
use nodedock_core::driver::values::{Audited, Write};
use nodedock_core::sysfs::attribute::{Attribute, Written, replaced};
use nodedock_core::sysfs::blocking::{blocking, write_stuck};
use nodedock_core::sysfs::{VALUE_BYTES_MAX, check_path};
use nodedock_model::limit::{SYSFS_WRITE_WALL, SYSFS_WRITES_PER_CALL};
use nodedock_model::{DriverName, ObjectRef, Problem};

impl State {
    pub(super) async fn write_value(&mut self, path: String, value: String) -> Result<(), Problem> {
        let admitted = self.admit_write(&path, &value);
        let wish = Wish {
            scope: Arc::clone(&self.scope),
            request: Arc::clone(&self.request),
            claims: self.writes_for.clone().unwrap_or_default(),
            path,
            value,
        };
        let mut found = None;
        let end = match admitted {
            Ok(driver) => wish.write(&driver, &mut found).await,
            Err(problem) => End::Known(Err(problem)),
        };
        // What was read before may have changed with it, also by a write that failed.
        self.view.forget_what_was_seen();
        wish.audit(found.as_ref(), end)
    }

    fn admit_write(&mut self, path: &str, value: &str) -> Result<DriverName, Problem> {
        self.view.count_operation()?;
        check_path(path)?;
        let (Some(driver), true) = (self.scope.driver.clone(), self.writes_for.is_some()) else {
            let message = format!("{path} may be written during prepare and unprepare only");
            return Err(Problem::denied("not-now", message));
        };
        if value.len() > VALUE_BYTES_MAX {
            let message = format!("a value has at most {VALUE_BYTES_MAX} bytes");
            return Err(Problem::invalid("value-too-large", message));
        }
        if value.contains('\0') {
            return Err(Problem::invalid("bad-value", "a value has no zero byte"));
        }
        if !self.scope.effective.allows_sysfs_write(path, value) {
            return Err(not_granted("sysfsWrite", path));
        }
        self.view.count_write()?;
        Ok(driver)
    }
}

impl CallView {
    fn count_write(&mut self) -> Result<(), Reached> {
        self.writes += 1;
        if self.writes <= SYSFS_WRITES_PER_CALL {
            return Ok(());
        }
        Err(self.refuse(Limit::SysfsWrites, SYSFS_WRITES_PER_CALL))
    }
}

/// What a driver wants written.
struct Wish {
    scope: Arc<Scope>,
    request: Arc<str>,
    claims: Arc<[ObjectRef]>,
    path: String,
    value: String,
}

enum Stored {
    Ended(Written),
    NotBegun(Problem),
    /// It may have been written, or be written yet.
    Unknown(Problem),
}

/// What a write came to.
enum End {
    Known(Result<(), Problem>),
    /// The audit has its line already.
    Unknown(Problem),
}

/// The right to write to a path.
type Turn = Vec<Held<String>>;

impl Wish {
    async fn write(&self, driver: &DriverName, at: &mut Option<Attribute>) -> End {
        match self.begin(driver, at).await {
            Ok(end) => end,
            Err(problem) => End::Known(Err(problem)),
        }
    }

    async fn begin(&self, driver: &DriverName, at: &mut Option<Attribute>) -> Result<End, Problem> {
        let first = self.look().await?;
        let journal = &self.scope.node.journal;
        let turn = journal.turn(&first.path).await;
        // A link may lead elsewhere by the time that it is this write's turn, and a device may be another.
        let found = self.look().await?;
        if (&found.path, found.inode) != (&first.path, first.inode) {
            return Err(replaced(&self.path));
        }
        let found = at.insert(found);
        let (claims, path, inode) = (&*self.claims, &*found.path, found.inode);
        let write = Write { driver, claims, path, inode, before: found.value.as_deref(), value: &self.value };
        journal.intend(&write).await?;
        // It may have waited long for its turn, and an operator may have taken the right back.
        if let Err(problem) = self.check_granted() {
            journal.settle(&write, None);
            return Err(problem);
        }
        failpoint::pass(Point::SysfsWriteIntended);
        // Whoever drops this here leaves the intent, which says that the value may have been written, and a line that says so too.
        let mut open = Unfinished(Some(self.line(Some(found))));
        let (stored, _turn) = self.store(found, turn).await;
        failpoint::pass(Point::SysfsWritten);
        let outcome = match stored {
            Stored::Ended(written) => {
                let untouched = written.outcome.is_err() && written.stands == found.value;
                let stands = written.stands.unwrap_or_else(|| self.value.trim_end().to_owned());
                journal.settle(&write, (!untouched).then_some(stands));
                written.outcome
            }
            Stored::NotBegun(problem) => {
                journal.settle(&write, None);
                Err(problem)
            }
            Stored::Unknown(problem) => return Ok(End::Unknown(problem)),
        };
        open.0 = None;
        Ok(End::Known(outcome))
    }

    fn check_granted(&self) -> Result<(), Problem> {
        let granted = self.scope.effective.allows_sysfs_write(&self.path, &self.value);
        if granted { Ok(()) } else { Err(not_granted("sysfsWrite", &self.path)) }
    }

    async fn look(&self) -> Result<Attribute, Problem> {
        let (sysfs, path) = (Arc::clone(&self.scope.node.sysfs), self.path.clone());
        self.scope.look(move || sysfs.attribute(&path)).await
    }

    /// The path's turn lasts to the end of the write: a thread that hangs in it keeps it.
    async fn store(&self, found: &Attribute, turn: Turn) -> (Stored, Option<Turn>) {
        let sysfs = Arc::clone(&self.scope.node.sysfs);
        let (found, value) = (found.clone(), self.value.clone());
        // Two kinds of failure are told apart: a refusal before the write, and a thread that did not come back.
        let work = move || Ok((sysfs.store(&found, &value), turn));
        match blocking(&self.scope.blocking, SYSFS_WRITE_WALL, write_stuck, work).await {
            Ok((Ok(written), turn)) => (Stored::Ended(written), Some(turn)),
            Ok((Err(problem), turn)) => (Stored::NotBegun(problem), Some(turn)),
            Err(problem) => (Stored::Unknown(problem), None),
        }
    }

    fn line<'a>(&'a self, found: Option<&'a Attribute>) -> Audited<'a> {
        Audited {
            driver: self.scope.driver.as_ref().map_or("", DriverName::as_str),
            claims: &self.claims,
            request: &self.request,
            path: found.map_or(&self.path, |found| &found.path),
            before: found.and_then(|found| found.value.as_deref()),
            after: Some(&self.value),
            outcome: "unknown",
            problem: None,
        }
    }

    fn audit(&self, found: Option<&Attribute>, end: End) -> Result<(), Problem> {
        let outcome = match end {
            End::Known(outcome) => outcome,
            End::Unknown(problem) => return Err(problem),
        };
        let line = self.line(found);
        let Err(problem) = &outcome else {
            Audited { outcome: "written", ..line }.tell(0);
            return outcome;
        };
        let line = Audited { outcome: "refused", problem: Some(problem), ..line };
        if let Some(suppressed) = self.scope.log.admit_refusal(line.bytes()) {
            line.tell(suppressed);
        }
        outcome
    }
}

/// The line of a write of which nobody knows what came of it, unless it is taken out.
struct Unfinished<'a>(Option<Audited<'a>>);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(line) = self.0.take() {
            line.tell(0);
        }
    }
}
