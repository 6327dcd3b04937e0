//! Writes below `/sys`: values and kernel drivers of PCI functions. Each is within the grant and the ceiling, durable as an intent before
//! it happens, and in the audit log.

use std::sync::Arc;

use crate::bindings::nodedock::driver::sysfs_write;
use crate::host_functions::not_granted;
use crate::host_functions::state::{CallState, Scope};
use crate::limits::limiter::Reached;
use crate::stats::Limit;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::locks::LockGuard;
use nodedock_core::driver::values::{Audited, Write};
use nodedock_core::sysfs::attribute::{Attribute, Written, replaced};
use nodedock_core::sysfs::blocking::{blocking, write_stuck};
use nodedock_core::sysfs::pci::PciAddress;
use nodedock_core::sysfs::{SysfsRoot, VALUE_BYTES_MAX, check_path};
use nodedock_model::grant::Effective;
use nodedock_model::limit::SYSFS_WRITE_WALL;
use nodedock_model::{DriverName, ObjectRef, Problem, ProblemCode};

/// Values that one call may write below `/sys`: a driver that writes more is at fault.
pub(crate) const WRITES_PER_CALL: usize = 256;

impl sysfs_write::Host for CallState {
    async fn write(&mut self, path: String, value: String) -> Result<(), Problem> {
        let admitted = self.admit_write(&path, &value);
        self.write_value(Target::Attribute(path), value, admitted)
            .await
            .map(drop)
    }
}

impl CallState {
    /// Writes what was admitted, and writes the line of the audit. Returns the value before, with the path without links.
    pub(crate) async fn write_value(
        &mut self,
        target: Target,
        value: String,
        admitted: Result<DriverName, Problem>,
    ) -> Result<Option<Attribute>, Problem> {
        let write = ValueWrite {
            scope: Arc::clone(&self.scope),
            request: Arc::clone(&self.request),
            claims: self.writes_for.clone().unwrap_or_default(),
            target,
            value,
        };
        let mut found = None;
        let result = match admitted {
            Ok(driver) => write.run(&driver, &mut found).await,
            Err(problem) => Err(Failure::Refused(problem)),
        };
        // A write may change other attributes, also one that failed.
        self.seen.clear();
        write.audit(found.as_ref(), result)?;
        Ok(found)
    }

    /// The driver, if the call is one that may change the node.
    pub(crate) fn writer(&self, what: &str) -> Result<DriverName, Problem> {
        match (&self.scope.driver, &self.writes_for) {
            (Some(driver), Some(_)) => Ok(driver.clone()),
            _ => {
                let message = format!("{what} may be written during prepare and unprepare only");
                Err(Problem::denied(ProblemCode::NotNow, message))
            }
        }
    }

    pub(crate) fn count_write(&mut self) -> Result<(), Reached> {
        self.writes += 1;
        if self.writes > WRITES_PER_CALL {
            return Err(self.refuse(Limit::SysfsWrites, WRITES_PER_CALL));
        }
        Ok(())
    }

    fn admit_write(&mut self, path: &str, value: &str) -> Result<DriverName, Problem> {
        self.count_operation()?;
        check_path(path)?;
        let driver = self.writer(path)?;
        if value.len() > VALUE_BYTES_MAX {
            let message = format!("a value has at most {VALUE_BYTES_MAX} bytes");
            return Err(Problem::invalid(ProblemCode::ValueTooLarge, message));
        }
        if value.contains('\0') {
            return Err(Problem::invalid(
                ProblemCode::BadValue,
                "a value has no zero byte",
            ));
        }
        Target::Attribute(path.to_owned()).check_grant(&self.scope.effective, value)?;
        self.count_write()?;
        Ok(driver)
    }
}

/// Target of a write.
#[derive(Clone)]
pub(crate) enum Target {
    /// The path of a file, as the driver names it.
    Attribute(String),
    /// The kernel driver of a function, which the grant must have.
    Bind(PciAddress, String),
    /// The kernel driver that a function had before: no grant has it.
    Unbind(PciAddress),
}

impl Target {
    /// Returns the name for messages and the audit, until its path is known.
    fn name(&self) -> &str {
        match self {
            Self::Attribute(path) => path,
            Self::Bind(address, _) | Self::Unbind(address) => address.as_str(),
        }
    }

    fn find(&self, sysfs: &SysfsRoot) -> Result<Attribute, Problem> {
        match self {
            Self::Attribute(path) => sysfs.attribute(path),
            Self::Bind(address, _) | Self::Unbind(address) => sysfs.pci().binding(address),
        }
    }

    /// The problem of a write that is not granted, or not any more.
    pub(crate) fn check_grant(&self, effective: &Effective, value: &str) -> Result<(), Problem> {
        match self {
            Self::Attribute(path) if !effective.allows_sysfs_write(path, value) => {
                Err(not_granted("sysfsWrite", path))
            }
            Self::Bind(address, driver) if !effective.allows_bind(address.as_str(), driver) => Err(
                not_granted("pciDriver", &format!("{address} with {driver}")),
            ),
            Self::Attribute(_) | Self::Bind(..) | Self::Unbind(_) => Ok(()),
        }
    }
}

/// A write that a driver requested.
struct ValueWrite {
    scope: Arc<Scope>,
    request: Arc<str>,
    claims: Arc<[ObjectRef]>,
    target: Target,
    value: String,
}

enum Failure {
    Refused(Problem),
    /// The value may have been written, or may be written yet. Its line is in the audit log.
    Unknown(Problem),
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self::Refused(problem)
    }
}

impl ValueWrite {
    async fn run(&self, driver: &DriverName, found: &mut Option<Attribute>) -> Result<(), Failure> {
        let first = self.look().await?;
        let journal = &self.scope.node.journal;
        let lock = journal.lock_path(&first.path).await;
        // While this waited for the lock, a link may have changed, and a device may have been replaced.
        let current = self.look().await?;
        if (&current.path, current.inode) != (&first.path, first.inode) {
            return Err(replaced(self.target.name()).into());
        }
        let current = found.insert(current);
        let (claims, path, inode) = (&*self.claims, &*current.path, current.inode);
        let write = Write {
            driver,
            claims,
            path,
            inode,
            before: current.value.as_deref(),
            value: &self.value,
        };
        journal.intend(&write).await?;
        // Meanwhile an operator may have revoked the grant.
        if let Err(problem) = self.target.check_grant(&self.scope.effective, &self.value) {
            journal.settle(&write, None);
            return Err(problem.into());
        }
        failpoint::pass(Point::SysfsWriteIntended);
        // When this future is dropped here, the intent stays, which says that the value may have been written; so does this line.
        let mut unfinished = Unfinished(Some(self.line(Some(current))));
        let stored = self.store(current, lock).await;
        failpoint::pass(Point::SysfsWritten);
        let (stored, _lock) = stored.map_err(Failure::Unknown)?;
        let outcome = match stored {
            Ok(written) => {
                // A value that could not be read back is taken to be the written one.
                let now = written
                    .value
                    .unwrap_or_else(|_| Some(self.value.trim_end().to_owned()));
                let untouched = written.outcome.is_err() && now == current.value;
                let value = now.unwrap_or_else(|| self.value.trim_end().to_owned());
                journal.settle(&write, (!untouched).then_some(value));
                written.outcome
            }
            Err(problem) => {
                journal.settle(&write, None);
                Err(problem)
            }
        };
        unfinished.0 = None;
        Ok(outcome?)
    }

    async fn look(&self) -> Result<Attribute, Problem> {
        let (sysfs, target) = (Arc::clone(&self.scope.node.sysfs), self.target.clone());
        self.scope.look(move || target.find(&sysfs)).await
    }

    /// Writes the value. The path stays locked until the write ends, also in a thread that hangs. The inner error: nothing was written.
    async fn store(
        &self,
        found: &Attribute,
        lock: Vec<LockGuard<String>>,
    ) -> Result<(Result<Written, Problem>, Vec<LockGuard<String>>), Problem> {
        let (sysfs, found) = (Arc::clone(&self.scope.node.sysfs), found.clone());
        let value = self.value.clone();
        blocking(
            &self.scope.blocking,
            SYSFS_WRITE_WALL,
            write_stuck,
            move || Ok((sysfs.store(&found, &value), lock)),
        )
        .await
    }

    fn line<'a>(&'a self, found: Option<&'a Attribute>) -> Audited<'a> {
        Audited {
            driver: self.scope.driver.as_ref().map_or("", DriverName::as_str),
            claims: &self.claims,
            request: &self.request,
            path: found.map_or(self.target.name(), |found| &found.path),
            before: found.and_then(|found| found.value.as_deref()),
            after: Some(&self.value),
            outcome: "unknown",
            problem: None,
        }
    }

    fn audit(&self, found: Option<&Attribute>, result: Result<(), Failure>) -> Result<(), Problem> {
        let line = self.line(found);
        match result {
            Ok(()) => {
                Audited {
                    outcome: "written",
                    ..line
                }
                .tell(0);
                Ok(())
            }
            Err(Failure::Unknown(problem)) => Err(problem),
            Err(Failure::Refused(problem)) => {
                let line = Audited {
                    outcome: "refused",
                    problem: Some(&problem),
                    ..line
                };
                if let Some(suppressed) = self.scope.log.admit_refusal(line.bytes()) {
                    line.tell(suppressed);
                }
                Err(problem)
            }
        }
    }
}

/// The audit line of a write with an unknown result, written when this is dropped.
struct Unfinished<'a>(Option<Audited<'a>>);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(line) = self.0.take() {
            line.tell(0);
        }
    }
}
