//! Restores values below `/sys` without the driver that wrote them: beneath `/sys`, within what may be written at all, and only where they
//! are still as the driver left them.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::sysfs::attribute::{Attribute, Written, replaced};
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
    /// Value that was written: of a list of choices the chosen one. `None`: nothing.
    pub written: Option<String>,
    pub problem: Option<Problem>,
}

impl Fate {
    pub fn left(found: Option<String>, problem: Problem) -> Self {
        Self {
            end: PutBackEnd::Left,
            found,
            written: None,
            problem: Some(problem),
        }
    }
}

impl SysfsTree {
    pub fn new(root: SysfsRoot) -> Self {
        Self {
            root: Arc::new(root),
            threads: Arc::new(Semaphore::new(SYSFS_THREADS_PER_DRIVER)),
        }
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
            return Fate::left(
                stood,
                Problem::unavailable(ProblemCode::ValueUnknown, message),
            );
        };
        let Some(now) = found.value.as_deref() else {
            let message = format!("/sys/{path} cannot be read, so it is unknown whose value it is");
            return Fate::left(
                None,
                Problem::unavailable(ProblemCode::ValueUnreadable, message),
            );
        };
        if now == before {
            return Fate {
                end: PutBackEnd::AsBefore,
                found: stood,
                written: None,
                problem: None,
            };
        }
        let is_binding = pci::is_binding(path);
        let is_left = if is_binding {
            pci::may_have_left(kept, now)
        } else {
            kept.may_have_left(now)
        };
        if !is_left {
            let left = kept.left().unwrap_or_default();
            let message = format!(
                "/sys/{path} is {now:?}, and the driver left {left:?}: another program changed it"
            );
            return Fate::left(stood, Problem::conflict(ProblemCode::ValueChanged, message));
        }
        if dry {
            return Fate {
                end: PutBackEnd::Possible,
                found: stood,
                written: None,
                problem: None,
            };
        }
        failpoint::pass(Point::PutBackBegun);
        let fate = self.write_back(&found, before);
        failpoint::pass(Point::PutBackWritten);
        fate
    }

    /// The file of a stored value, if its path still names that file.
    fn same(&self, kept: &KeptValue) -> Result<Attribute, Problem> {
        let found = match pci::is_binding(&kept.path) {
            true => self.pci().binding_at(&kept.path),
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
        let is_binding = pci::is_binding(&found.path);
        let chosen = found
            .value
            .as_deref()
            .filter(|_| !is_binding)
            .and_then(|now| chosen(before, now));
        let whole = if before.is_empty() && !is_binding {
            "\n"
        } else {
            before
        };
        let mut value = chosen.unwrap_or(whole);
        let mut stored = self.store(found, value);
        // A text that only looked like a list of choices is now what was written.
        let is_text = |stored: &Written| {
            stored.outcome.is_ok()
                && matches!(&stored.value, Ok(reads) if reads.as_deref() == chosen)
        };
        if chosen.is_some() && stored.as_ref().is_ok_and(is_text) {
            value = whole;
            stored = self.store(found, value);
        }
        // A list that has other choices by now takes no whole list, but the one that was chosen if it is still among them.
        if let (None, Some(word)) = (
            chosen,
            found
                .value
                .as_deref()
                .and_then(|now| still_listed(before, now)),
        ) && stored.as_ref().is_ok_and(|stored| stored.outcome.is_err())
        {
            value = word;
            stored = self.store(found, value);
        }
        let written = match stored {
            Ok(written) => written,
            Err(problem) => return Fate::left(stood, problem),
        };
        if let Err(problem) = written.outcome {
            return Fate::left(stood, problem);
        }
        let odd = match written.value {
            Ok(reads) => reads.filter(|reads| reads != before).map(|reads| {
                let message = format!("/sys/{} took {value:?} and reads as {reads:?}", found.path);
                Problem::unavailable(ProblemCode::ValueReadsOtherwise, message)
            }),
            Err(problem) => Some(problem),
        };
        let written = Some(value.trim_end().to_owned());
        Fate {
            end: PutBackEnd::PutBack,
            found: stood,
            written,
            problem: odd,
        }
    }
}

/// Returns the word that has to be written for a list of choices (`none [timer] heartbeat`) to read as before: the one in brackets. It is
/// such a list only if it has the same choices now, of which one is chosen. Any other text is written as it was.
fn chosen<'a>(before: &'a str, now: &str) -> Option<&'a str> {
    let (was, is) = (Choices::parse(before)?, Choices::parse(now)?);
    (was.all == is.all).then_some(was.chosen)
}

/// Returns the word that was chosen, if it is among the choices of now. Only for a file that refuses the whole text.
fn still_listed<'a>(before: &'a str, now: &str) -> Option<&'a str> {
    let (was, is) = (Choices::parse(before)?, Choices::parse(now)?);
    is.all.contains(&was.chosen).then_some(was.chosen)
}

/// The choices of an attribute that lists all of them.
struct Choices<'a> {
    /// Sorted: some attributes put the chosen one first.
    all: Vec<&'a str>,
    chosen: &'a str,
}

impl<'a> Choices<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (mut all, mut chosen) = (Vec::new(), None);
        for word in text.split_whitespace() {
            let inner = word
                .strip_prefix('[')
                .and_then(|word| word.strip_suffix(']'));
            match inner {
                Some("") => return None,
                Some(_) if chosen.is_some() => return None,
                Some(inner) => chosen = Some(inner),
                None => {}
            }
            all.push(inner.unwrap_or(word));
        }
        all.sort_unstable();
        (all.len() > 1).then_some(Self {
            all,
            chosen: chosen?,
        })
    }
}

#[cfg(test)]
mod tests;
