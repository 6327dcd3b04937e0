//! Restores values below `/sys` without the driver that wrote them: beneath `/sys`, within what may be written at all, and only where they
//! are still as the driver left them.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::sysfs::attribute::{Attribute, replaced};
use crate::sysfs::blocking::{SYSFS_THREADS_PER_DRIVER, blocking, write_stuck};
use crate::sysfs::{SysfsRoot, pci};
use nodedock_base::failpoint::{self, Point};
use nodedock_model::limit::SYSFS_WRITE_WALL;
use nodedock_model::{KeptValue, Problem, ProblemCode, ProblemKind, PutBackEnd};

/// `/sys`, or a tree of a test, for the host's own writes. Clones are the same.
#[derive(Clone)]
pub struct SysfsTree {
    root: Arc<SysfsRoot>,
    threads: Arc<Semaphore>,
}

/// The result of restoring one value.
#[derive(Debug, Clone, PartialEq)]
pub struct Fate {
    pub end: PutBackEnd,
    /// The value before.
    pub found: Option<String>,
    pub problem: Option<Problem>,
}

impl Fate {
    pub fn left(found: Option<String>, problem: Problem) -> Self {
        Self { end: PutBackEnd::Left, found, problem: Some(problem) }
    }
}

impl SysfsTree {
    pub fn new(root: SysfsRoot) -> Self {
        Self { root: Arc::new(root), threads: Arc::new(Semaphore::new(SYSFS_THREADS_PER_DRIVER)) }
    }

    /// Restores a value where that is possible; `dry`: only reports whether it is.
    pub async fn restore(&self, kept: &KeptValue, dry: bool) -> Fate {
        let (root, kept) = (Arc::clone(&self.root), kept.clone());
        let work = move || Ok(root.restore(&kept, dry));
        let fate = blocking(&self.threads, SYSFS_WRITE_WALL, write_stuck, work).await;
        fate.unwrap_or_else(|problem| Fate::left(None, problem))
    }
}

impl SysfsRoot {
    pub(super) fn restore(&self, kept: &KeptValue, dry: bool) -> Fate {
        let path = &kept.path;
        let found = match self.same(kept) {
            Ok(found) => found,
            Err(problem) => return Fate::left(None, problem),
        };
        let stood = found.value.clone();
        let Some(before) = kept.before.as_deref() else {
            let message = format!("what /sys/{path} was before could not be read");
            return Fate::left(stood, Problem::unavailable(ProblemCode::ValueUnknown, message));
        };
        let Some(now) = found.value.as_deref() else {
            let message = format!("/sys/{path} cannot be read, so it is unknown whose value it is");
            return Fate::left(None, Problem::unavailable(ProblemCode::ValueUnreadable, message));
        };
        if now == before {
            return Fate { end: PutBackEnd::AsBefore, found: stood, problem: None };
        }
        let is_binding = pci::is_binding(path);
        let is_left = if is_binding { pci::may_have_left(kept, now) } else { kept.may_have_left(now) };
        if !is_left {
            let left = kept.left().unwrap_or_default();
            let message =
                format!("/sys/{path} is {now:?}, and the driver left {left:?}: another program changed it");
            return Fate::left(stood, Problem::conflict(ProblemCode::ValueChanged, message));
        }
        if dry {
            return Fate { end: PutBackEnd::Possible, found: stood, problem: None };
        }
        failpoint::pass(Point::PutBackBegun);
        let fate = self.write_back(&found, before);
        failpoint::pass(Point::PutBackWritten);
        fate
    }

    /// The file of a stored value, if its path still names that file.
    fn same(&self, kept: &KeptValue) -> Result<Attribute, Problem> {
        let found = match pci::is_binding(&kept.path) {
            true => self.binding_at(&kept.path),
            false => self.attribute(&kept.path),
        };
        let found = found.map_err(|problem| match problem.kind {
            ProblemKind::NotFound => Problem::not_found(
                ProblemCode::PathGone,
                format!("/sys/{} is gone, and its value with it", kept.path),
            ),
            _ => problem,
        })?;
        match found.path == kept.path && found.inode == kept.inode {
            true => Ok(found),
            false => Err(replaced(&kept.path)),
        }
    }

    fn write_back(&self, found: &Attribute, before: &str) -> Fate {
        let stood = found.value.clone();
        let value = if pci::is_binding(&found.path) { before.to_owned() } else { to_write(before) };
        let written = match self.store(found, &value) {
            Ok(written) => written,
            Err(problem) => return Fate::left(stood, problem),
        };
        if let Err(problem) = written.outcome {
            return Fate::left(stood, problem);
        }
        let odd = match written.value {
            Ok(value) => value.filter(|value| value != before).map(|value| {
                let message = format!("/sys/{} took {before:?} and reads as {value:?}", found.path);
                Problem::unavailable(ProblemCode::ValueReadsOtherwise, message)
            }),
            Err(problem) => Some(problem),
        };
        Fate { end: PutBackEnd::PutBack, found: stood, problem: odd }
    }
}

/// What has to be written for an attribute to read as before. Of a list of choices (`none [timer] heartbeat`) the chosen one is written,
/// and for an empty value an empty line: the kernel ignores a write of no bytes.
fn to_write(before: &str) -> String {
    let chosen = |word: &&str| word.len() > 2 && word.starts_with('[') && word.ends_with(']');
    let mut choices = before.split_whitespace().filter(chosen);
    match (choices.next(), choices.next()) {
        (Some(word), None) if before.contains(char::is_whitespace) => word[1..word.len() - 1].to_owned(),
        _ if before.is_empty() => "\n".to_owned(),
        _ => before.to_owned(),
    }
}

#[cfg(test)]
mod tests;
