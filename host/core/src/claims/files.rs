//! CDI files in step with claims: made right before an answer, when somebody touches the folder, and on a slow period.
//!
//! Owns the conditions about claims' files. A file that is wrong is rendered again from the record; what stands in the way, or
//! is for others to write, is said.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use super::machine;
use super::{Inner, unrendered};
use crate::cdi::{self, CdiDir, CdiError, SpecFile};
use crate::cdi_watch::SpecEvent;
use crate::driver::moved::{Moved, first_moved};
use nodedock_base::backoff::Backoff;
use nodedock_base::clock::now_ms;
use nodedock_base::error::chain;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{ClaimRecord, ClaimState, DeviceAccess, DriverName, DriverPart, Problem, Uid, limit};

const NOT_WRITTEN: &str = "cdi-not-written";
const NOT_VALID: &str = "cdi-not-valid";
const FOREIGN: &str = "cdi-file-foreign";
const CLAIMED_TWICE: &str = "cdi-device-claimed-twice";
const MISSING: &str = "cdi-device-missing";
const MOVED: &str = "device-node-moved";
/// Every condition about a claim's files.
const CODES: [&str; 6] = [NOT_WRITTEN, NOT_VALID, FOREIGN, CLAIMED_TWICE, MISSING, MOVED];
/// The condition about the folders, and what it is about.
const NOT_READ: &str = "cdi-not-read";
const FOLDERS: &str = "CDI folders";

/// Devices that a problem names: its message is one line.
const DEVICES_NAMED_MAX: usize = 3;
/// A claim that somebody is at work on is come back to after so long.
const BUSY_WAIT: Duration = Duration::from_millis(100);
/// Where there is no watch everything is looked through again and again: after so many times what that takes.
const SWEEP_REST: u32 = 10;

/// Claims about whose files a condition stands.
#[derive(Default)]
pub(super) struct Troubled {
    claims: Mutex<BTreeSet<Uid>>,
    /// Wakes the task that keeps files right when there is one more.
    more: Notify,
}

impl Troubled {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<Uid>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known of the device nodes in claims' files.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Nodes {
    /// They are what they were: a prepare has just looked.
    Right,
    /// Somebody has to look.
    Unsure,
}

/// When claims in trouble are looked at again.
struct Retry {
    at: Option<Instant>,
    backoff: Backoff,
}

impl Retry {
    fn new() -> Self {
        Self { at: None, backoff: Backoff::new(limit::CDI_RETRY_MIN, limit::CDI_SWEEP_PERIOD) }
    }

    /// Whether it is time; the next time is then found by `plan`.
    fn is_due(&mut self, now: Instant) -> bool {
        self.at.take_if(|at| *at <= now).is_some()
    }

    /// There is one more: soon again, and no later than it would have been for the others.
    fn begin_anew(&mut self) {
        let mut anew = Self::new();
        let soon = Instant::now() + anew.backoff.delay();
        anew.at = Some(self.at.map_or(soon, |at| at.min(soon)));
        *self = anew;
    }

    fn plan(&mut self, troubled: bool) {
        if troubled {
            self.at = self.at.or_else(|| Some(Instant::now() + self.backoff.delay()));
        } else {
            *self = Self::new();
        }
    }
}

impl Inner {
    /// Makes the files of claims right and says what is wrong with them. Gives the claims that cannot be answered for: without a
    /// file, or with a device that somebody else's file has too.
    pub(super) async fn check_files(
        &self,
        records: &[Arc<ClaimRecord>],
        nodes: Nodes,
    ) -> BTreeMap<Uid, Problem> {
        let (_, refused) = self.write_files(records).await;
        self.check_written(records, nodes, refused).await
    }

    /// The rest of the look, when the files are written.
    async fn check_written(
        &self,
        records: &[Arc<ClaimRecord>],
        nodes: Nodes,
        mut refused: BTreeMap<Uid, Problem>,
    ) -> BTreeMap<Uid, Problem> {
        self.survey().await;
        for record in records {
            let (uid, collision) = (&record.id.uid, collision(&self.cdi, record));
            let moved = if nodes == Nodes::Unsure { moved(record) } else { None };
            let wrong = [refused.get(uid).cloned(), collision.clone(), missing(&self.cdi, record), moved];
            self.say(record, wrong.into_iter().flatten().collect());
            if let Some(collision) = collision {
                refused.entry(uid.clone()).or_insert(collision);
            }
        }
        refused
    }

    /// Of claims that are prepared already: makes their files right, and writes into their history when files that others have to
    /// write go missing or come back.
    pub(super) async fn check_standing_files(
        &self,
        records: &[Arc<ClaimRecord>],
        nodes: Nodes,
    ) -> BTreeMap<Uid, Problem> {
        let (rendered, refused) = self.write_files(records).await;
        self.metrics.files_rendered_again.fetch_add(rendered, Relaxed);
        let refused = self.check_written(records, nodes, refused).await;
        let noted = records.iter().filter_map(|record| self.noted(record)).collect::<Vec<_>>();
        if !noted.is_empty()
            && let Err(problem) = self.commit_claims(noted).await
        {
            tracing::warn!(%problem, "what is wrong with CDI files of plugins is not in the checkpoint");
        }
        refused
    }

    /// The records, with a note in the history of those whose plugin has not written what it named.
    pub(super) async fn with_notes(&self, records: Vec<Arc<ClaimRecord>>) -> Vec<Arc<ClaimRecord>> {
        if records.iter().any(|record| !native_names(record).is_empty()) {
            self.survey().await;
        }
        records.into_iter().map(|record| self.noted(&record).unwrap_or(record)).collect()
    }

    fn noted(&self, record: &Arc<ClaimRecord>) -> Option<Arc<ClaimRecord>> {
        machine::note_files(record, missing(&self.cdi, record), now_ms())
    }

    /// What is not read stays as it was read last.
    async fn survey(&self) {
        self.say_read(self.cdi.survey().await);
    }

    fn say_read(&self, read: Result<(), CdiError>) {
        match read {
            Ok(()) => self.conditions.clear(NOT_READ, FOLDERS),
            Err(error) => self.conditions.set(FOLDERS, Problem::unavailable(NOT_READ, chain(&error))),
        }
    }

    /// Says what is wrong with a claim's files, and that the rest is over.
    fn say(&self, record: &ClaimRecord, wrong: Vec<Problem>) {
        let mut troubled = self.troubled.lock();
        if wrong.is_empty() && !troubled.remove(&record.id.uid) {
            return;
        }
        let subject = subject(record);
        let over = CODES.iter().filter(|code| wrong.iter().all(|problem| problem.code != **code));
        over.for_each(|code| self.conditions.clear(code, &subject));
        if !wrong.is_empty() && troubled.insert(record.id.uid.clone()) {
            self.troubled.more.notify_one();
        }
        wrong.into_iter().for_each(|problem| self.conditions.set(&subject, problem));
    }

    /// A claim that is gone has no troubles.
    pub(super) fn forget_files(&self, record: &ClaimRecord) {
        self.say(record, Vec::new());
    }

    /// Writes the CDI files of claims that lack one, or have another than the checkpoint says. Gives how many that were, and the claims
    /// that have none.
    async fn write_files(&self, records: &[Arc<ClaimRecord>]) -> (u64, BTreeMap<Uid, Problem>) {
        let mut failed = BTreeMap::new();
        let mut stale: Vec<(&Uid, Vec<SpecFile>)> = Vec::new();
        for record in records {
            match cdi::render(record) {
                Ok(mut files) => {
                    files.retain(|file| !self.cdi.is_current(file));
                    stale.extend((!files.is_empty()).then_some((&record.id.uid, files)));
                }
                Err(error) => drop(failed.insert(record.id.uid.clone(), unrendered(record, &error))),
            }
        }
        let all: Vec<_> = stale.iter().flat_map(|(_, files)| files.clone()).collect();
        let mut written = all.len() as u64;
        if self.cdi.write(all).await.is_ok() {
            return (written, failed);
        }
        // One that cannot be written does not keep the others.
        let each = stale.into_iter().map(|(uid, files)| async move {
            let count = files.len() as u64;
            (uid, self.cdi.write(files).await.map_err(|error| (count, error)))
        });
        for (uid, outcome) in futures::future::join_all(each).await {
            if let Err((count, error)) = outcome {
                written -= count;
                failed.insert(uid.clone(), not_written(&error));
            }
        }
        (written, failed)
    }

    /// Removes files of drivers whose part of a claim is void: a container that is started again must not get what is there no more.
    pub(super) async fn remove_void_files(&self, records: &[Arc<ClaimRecord>]) {
        let names: Vec<_> = records.iter().flat_map(|record| void_files(record)).collect();
        if let Err(error) = self.cdi.remove(names).await {
            tracing::warn!(error = chain(&error), "a cdi file of before stays");
        }
    }

    /// Keeps files right until the tasks stop: where somebody touched them, and all of them when something may have been missed
    /// and on a slow period.
    pub(super) async fn keep_files(&self, mut events: mpsc::Receiver<SpecEvent>) {
        let (mut sweep, mut rested) = (Instant::now() + limit::CDI_SWEEP_PERIOD, Instant::now());
        let (mut open, mut busy, mut retry) = (true, BTreeSet::new(), Retry::new());
        loop {
            let wake = if busy.is_empty() { sweep } else { sweep.min(Instant::now() + BUSY_WAIT) };
            let wake = retry.at.map_or(wake, |at| wake.min(at));
            tokio::select! {
                biased;
                // Nothing is lost by stopping: the next start looks at every file.
                () = self.tasks.stopped() => return,
                // An event that is not received now stays in the channel.
                event = events.recv(), if open => match event {
                    None => open = false,
                    Some(SpecEvent::Touched(names)) => busy.extend(self.look_at(names).await),
                    Some(SpecEvent::Unsure) => sweep = sweep.min(rested),
                },
                // The permit stays until somebody takes it.
                () = self.troubled.more.notified() => retry.begin_anew(),
                () = tokio::time::sleep_until(wake) => {}
            }
            let started = Instant::now();
            if started >= sweep {
                busy.extend(self.sweep_files().await);
                sweep = Instant::now() + limit::CDI_SWEEP_PERIOD;
                rested = Instant::now() + started.elapsed() * SWEEP_REST;
            }
            if retry.is_due(started) {
                busy.extend(self.troubled.lock().iter().cloned());
            }
            busy = self.tend(busy).await;
            retry.plan(!self.troubled.lock().is_empty());
        }
    }

    /// Finds the claims that touched files are about. What we wrote ourselves costs one `stat`.
    pub(super) async fn look_at(&self, names: BTreeSet<String>) -> BTreeSet<Uid> {
        let names: Vec<_> = names.into_iter().filter(|name| !self.cdi.is_as_left(name)).collect();
        if names.is_empty() {
            return BTreeSet::new();
        }
        let touched = self.cdi.touched(names.clone()).await;
        self.remove_orphans(touched.ours).await;
        let mut uids: BTreeSet<_> = self.troubled.lock().clone();
        uids.extend(names.iter().filter_map(|name| cdi::file_of(name)).map(|(_, uid)| uid));
        uids.extend(touched.devices.iter().flat_map(|device| self.claims_of_device(device)));
        uids
    }

    /// Claims that a device of ours may have in its name, `DRIVER/claim=UID-DEVICE`: a UID may have dashes as well.
    fn claims_of_device(&self, qualified: &str) -> Vec<Uid> {
        let Some((_, device)) = qualified.split_once('=') else { return Vec::new() };
        let table = self.table.lock();
        let prefixes = device.match_indices('-').map(|(at, _)| &device[..at]);
        prefixes.filter_map(|prefix| table.claim(prefix)).map(|record| record.id.uid.clone()).collect()
    }

    /// Makes the files of claims right. Gives those that somebody is at work on: they are come back to.
    pub(super) async fn tend(&self, uids: BTreeSet<Uid>) -> BTreeSet<Uid> {
        let mut busy = BTreeSet::new();
        let uids: Vec<_> = uids.into_iter().collect();
        for some in uids.chunks(limit::CDI_CLAIMS_AT_ONCE) {
            if self.tasks.is_stopping() {
                break;
            }
            let taken: Vec<_> = some.iter().map(|uid| (uid, self.claim_locks.try_take(uid))).collect();
            let (held, others): (Vec<_>, Vec<_>) = taken.iter().partition(|(_, lock)| lock.is_some());
            busy.extend(others.into_iter().map(|(uid, _)| (*uid).clone()));
            let records: Vec<_> = held.iter().filter_map(|(uid, _)| self.standing(uid)).collect();
            failpoint::pass(Point::ReconcileClaim);
            self.check_standing_files(&records, Nodes::Unsure).await;
            self.remove_void_files(&records).await;
        }
        busy
    }

    /// Makes the files of claims right on which nobody is at work. Gives those that cannot be answered for.
    pub(super) async fn check_at_rest(&self, uids: impl Iterator<Item = &Uid>) -> BTreeMap<Uid, Problem> {
        let held: Vec<_> = uids.filter_map(|uid| Some((uid, self.claim_locks.try_take(uid)?))).collect();
        let records: Vec<_> = held.iter().filter_map(|(uid, _)| self.standing(uid)).collect();
        self.check_standing_files(&records, Nodes::Unsure).await
    }

    /// A claim whose files are to be kept right. What is known to be wrong with another's files matters no more.
    fn standing(&self, uid: &Uid) -> Option<Arc<ClaimRecord>> {
        let record = self.table.lock().claim(uid.as_str()).cloned()?;
        if self.stands(&record) {
            return Some(record);
        }
        self.forget_files(&record);
        None
    }

    /// Looks through all standing claims and all files of ours. Gives the claims that need more than a look.
    pub(super) async fn sweep_files(&self) -> BTreeSet<Uid> {
        let standing: Vec<_> = {
            let table = self.table.lock();
            table.claims().filter(|record| self.stands(record)).cloned().collect()
        };
        let cdi = self.cdi.clone();
        // Renders every claim, and looks at every file: not for a thread that serves.
        let looked = tokio::task::spawn_blocking(move || look_through(&cdi, &standing)).await;
        match looked {
            Ok((wrong, surveyed)) => {
                self.say_read(surveyed);
                self.remove_orphans(self.cdi.strays()).await;
                wrong.into_iter().chain(self.troubled.lock().iter().cloned()).collect()
            }
            Err(error) => {
                tracing::error!(error = chain(&error), "cdi files not looked through");
                BTreeSet::new()
            }
        }
    }

    /// Removes files of ours that are no claim's: those of claims that nobody knows, and copies under other names.
    async fn remove_orphans(&self, names: Vec<String>) {
        for name in names {
            if cdi::file_of(&name).is_some_and(|(driver, uid)| self.has_part(&uid, &driver)) {
                continue;
            }
            // A file whose identity a newer release wrote is not ours to judge.
            let Some(identity) = self.cdi.read(&name).await.and_then(|file| file.identity) else { continue };
            let uid = identity.claim.uid;
            // Under its claim's lock: a pod may just be asking for it.
            let Some(_held) = self.claim_locks.try_take(&uid) else { continue };
            let known = self.table.lock().is_known(uid.as_str());
            if known && name == cdi::file_name(&identity.driver, &uid) {
                continue;
            }
            tracing::info!(file = name, claim = %uid, "removing a cdi file that no claim owns");
            failpoint::pass(Point::OrphanFound);
            if let Err(error) = self.cdi.remove(vec![name]).await {
                tracing::warn!(error = chain(&error), "a cdi file without an owner stays");
            }
            failpoint::pass(Point::OrphanRemoved);
        }
    }

    fn has_part(&self, uid: &Uid, driver: &DriverName) -> bool {
        let table = self.table.lock();
        let claim = table.claim(uid.as_str());
        claim.is_some_and(|claim| claim.allocation.devices.iter().any(|device| device.driver == *driver))
    }

    fn stands(&self, record: &ClaimRecord) -> bool {
        record.boot_id == self.settings.node.boot_id && record.state != ClaimState::Unpreparing
    }
}

/// The claims whose files are not as they should be. Blocks.
fn look_through(cdi: &CdiDir, standing: &[Arc<ClaimRecord>]) -> (Vec<Uid>, Result<(), CdiError>) {
    let surveyed = cdi.survey_anew();
    let current = |record: &ClaimRecord| {
        cdi::render(record).is_ok_and(|files| files.iter().all(|file| cdi.is_current(file)))
    };
    let wrong = |record: &&Arc<ClaimRecord>| {
        !current(record)
            || collision(cdi, record).is_some()
            || missing(cdi, record).is_some()
            || moved(record).is_some()
            || !void_files(record).is_empty()
    };
    (standing.iter().filter(wrong).map(|record| record.id.uid.clone()).collect(), surveyed)
}

fn subject(record: &ClaimRecord) -> String {
    format!("claim {}", record.id)
}

/// Files of drivers that prepared the claim and whose word counts no more.
fn void_files(record: &ClaimRecord) -> Vec<String> {
    let void = record.drivers.iter().filter(|(_, part)| part.stale && part.prepared_in == record.boot_id);
    void.map(|(driver, _)| cdi::file_name(driver, &record.id.uid)).collect()
}

/// The names under which a claim's devices are known to runtimes, for which `ours` tells whether we write their files.
fn names(record: &ClaimRecord, ours: bool) -> Vec<String> {
    let of_driver = |driver: &DriverName| {
        let prepared = record.drivers.get(driver).and_then(|part| part.current());
        let devices = prepared.map(|prepared| prepared.devices.as_slice()).unwrap_or_default();
        let is_ours = |at: usize| matches!(devices.get(at).map(|d| &d.access), Some(DeviceAccess::Edits(_)));
        let names = cdi::cdi_devices(record, driver).into_iter().filter(move |(at, _)| is_ours(*at) == ours);
        names.flat_map(|(_, names)| names).collect::<Vec<_>>()
    };
    record.drivers.keys().flat_map(of_driver).collect()
}

fn native_names(record: &ClaimRecord) -> Vec<String> {
    names(record, false)
}

/// Somebody else's file that has a device of the claim as well: runtimes would refuse it, or give what that file says.
fn collision(cdi: &CdiDir, record: &ClaimRecord) -> Option<Problem> {
    let found = cdi.collisions(&names(record, true)).into_iter().next()?;
    let (file, device) = (found.file.display(), &found.device);
    let message = format!(
        "{file} has the CDI device {device} as well, which is claim {}'s: container runtimes do not give a device that two files have; remove the other file",
        record.id
    );
    Some(Problem::conflict(CLAIMED_TWICE, message).with("file", file).with("device", device))
}

/// Devices of a native plugin that are in no file: it may write it a moment later, so that is no refusal.
fn missing(cdi: &CdiDir, record: &ClaimRecord) -> Option<Problem> {
    let names = native_names(record);
    let missing = if names.is_empty() { Vec::new() } else { cdi.missing(&names) };
    let first = missing.first()?;
    let mut named: Vec<_> = missing.iter().take(DEVICES_NAMED_MAX).cloned().collect();
    if missing.len() > DEVICES_NAMED_MAX {
        named.push(format!("and {} more", missing.len() - DEVICES_NAMED_MAX));
    }
    let message = format!(
        "no CDI file has {}, which the plugin of claim {} named: it writes these files itself",
        named.join(", "),
        record.id
    );
    Some(Problem::unavailable(MISSING, message).with("device", first))
}

/// A device node that is another now than in the claim's file, which stays: runtimes that start a container again may need it, and
/// the next prepare asks the driver.
fn moved(record: &ClaimRecord) -> Option<Problem> {
    let current = |(driver, part): (_, &DriverPart)| Some((driver, first_moved(part.current()?)?));
    let (driver, Moved { path, then, now }) = record.drivers.iter().find_map(current)?;
    let message = format!(
        "the device node {path} of claim {} was {then} when driver {driver} prepared it, and is {now}: a container that is started again may get what is there no more; the claim is prepared anew when a pod asks for it",
        record.id
    );
    let problem = Problem::unavailable(MOVED, message).with("node", path);
    Some(problem.with("driver", driver).with("then", then).with("now", now))
}

fn not_written(error: &CdiError) -> Problem {
    let message = format!("write CDI files: {}", chain(error));
    match error {
        CdiError::Foreign(file) => Problem::conflict(FOREIGN, message).with("file", file),
        _ => Problem::unavailable(NOT_WRITTEN, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Claims that came into trouble one after the other, each within a second of the one before, put off all of them until the
    /// slow sweep.
    #[tokio::test(start_paused = true)]
    async fn new_troubles_do_not_put_off_the_old_ones() {
        let mut retry = Retry::new();
        retry.plan(true);
        let (step, mut due) = (limit::CDI_RETRY_MIN * 3 / 4, Vec::new());
        for _ in 0..6 {
            tokio::time::advance(step).await;
            retry.begin_anew();
            due.push(retry.is_due(Instant::now()));
            retry.plan(true);
        }
        assert_eq!(due, [false, true, false, false, true, false]);
        retry.plan(false);
        assert_eq!(retry.at, None, "nothing is wrong any more");
    }
}
