//! CDI files of claims: repaired before an answer, when a file in the directory changes, and periodically.
//!
//! Owns the conditions about claims' files. A wrong file is rendered again from the record. A file of another program, and one that a
//! plugin has to write, is only reported.

mod metadata;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use self::metadata::wrong_files;
use super::metrics::ClaimMetrics;
use super::{machine, name_few, unrendered};
use crate::cdi::{self, CdiDir, CdiError, Given, SpecFile};
use crate::cdi_watch::SpecEvent;
use crate::device_metadata::{MetadataDir, MetadataSettings};
use crate::driver::moved::{Moved, first_moved};
use crate::edit_sources::{self, EditSources};
use crate::hardware::Hardware;
use crate::records::RecordStore;
use crate::sysfs::blocking::LOOK_WALL;
use nodedock_base::backoff::Backoff;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::tasks::Tasks;
use nodedock_base::woken;
use nodedock_model::{ClaimRecord, ClaimState, DriverKind, DriverName, Problem, ProblemCode, Uid};

/// Claims whose files are repaired together: bounds the time for which each is locked.
const CDI_CLAIMS_AT_ONCE: usize = 64;

/// Backoff of repairs of a claim's CDI files; doubled up to `CDI_SWEEP_PERIOD`.
const CDI_RETRY_MIN: Duration = Duration::from_secs(1);

/// Interval of checking the CDI directories, in addition to the watch: retries failures, and finds changes without events.
const CDI_SWEEP_PERIOD: Duration = Duration::from_secs(60);

/// Every condition about a claim's files.
const CODES: [ProblemCode; 8] = [
    ProblemCode::CdiNotWritten,
    ProblemCode::CdiNotValid,
    ProblemCode::CdiFileForeign,
    ProblemCode::CdiDeviceClaimedTwice,
    ProblemCode::CdiDeviceMissing,
    ProblemCode::DeviceNodeMoved,
    ProblemCode::EditSourceUnsafe,
    ProblemCode::MetadataNotWritten,
];
const DIRECTORIES: &str = "CDI directories";

/// Devices that a problem names: its message is one line.
const DEVICES_NAMED_MAX: usize = 3;
/// Time after which a locked claim is checked again.
const LOCKED_WAIT: Duration = Duration::from_millis(100);
/// Interval between checks of everything without a watch, as a multiple of the duration of a check.
const SWEEP_REST: u32 = 10;

/// State of the device nodes in claims' files: whether they have to be checked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Nodes {
    /// A prepare has just checked them.
    Checked,
    Unchecked,
}

/// Time of the next check of claims with conditions.
struct Recheck {
    at: Option<Instant>,
    backoff: Backoff,
}

impl Recheck {
    fn new() -> Self {
        Self {
            at: None,
            backoff: Backoff::new(CDI_RETRY_MIN, CDI_SWEEP_PERIOD),
        }
    }

    /// Returns whether the check is due, and clears its time; `plan` sets the next one.
    fn is_due(&mut self, now: Instant) -> bool {
        self.at.take_if(|at| *at <= now).is_some()
    }

    /// Restarts the backoff for a new condition; the others are not checked later than planned.
    fn restart(&mut self) {
        let mut restarted = Self::new();
        let soon = Instant::now() + restarted.backoff.delay();
        restarted.at = Some(self.at.map_or(soon, |at| at.min(soon)));
        *self = restarted;
    }

    fn plan(&mut self, has_conditions: bool) {
        if has_conditions {
            self.at = self
                .at
                .or_else(|| Some(Instant::now() + self.backoff.delay()));
        } else {
            *self = Self::new();
        }
    }
}

/// The owner of the CDI files and metadata files of claims.
pub struct SpecFiles {
    records: Arc<RecordStore>,
    cdi: CdiDir,
    metadata: MetadataDir,
    settings: FileSettings,
    conditions: Conditions,
    tasks: Tasks,
    metrics: Arc<ClaimMetrics>,
    /// Claims with a condition about their files.
    with_conditions: Mutex<BTreeSet<Uid>>,
    /// Wakes the task that repairs files when there is one more.
    condition_set: Notify,
}

/// Facts of the node that files depend on.
#[derive(Clone)]
pub(in crate::manager) struct FileSettings {
    pub(in crate::manager) boot_id: String,
    pub(in crate::manager) hardware: Hardware,
    pub(in crate::manager) metadata: MetadataSettings,
}

impl SpecFiles {
    pub(in crate::manager) fn new(
        records: Arc<RecordStore>,
        cdi: CdiDir,
        settings: FileSettings,
        conditions: Conditions,
        tasks: Tasks,
        metrics: Arc<ClaimMetrics>,
    ) -> Self {
        let metadata = MetadataDir::new(&settings.metadata.directory, settings.metadata.access);
        Self {
            records,
            cdi,
            metadata,
            settings,
            conditions,
            tasks,
            metrics,
            with_conditions: Mutex::default(),
            condition_set: Notify::new(),
        }
    }

    /// Returns the device nodes and network interfaces that the CDI files of plugins give for a device name, as of the last read of the
    /// directories.
    pub(super) fn given(&self, device: &str) -> Vec<Given> {
        self.cdi.given(device)
    }

    /// Repairs the CDI files of a pod's claims before they are reported; returns the problem of the first that cannot be repaired.
    /// Claims with an operation under way are left to it.
    pub async fn check_files_of(&self, pod: &str) -> Result<(), Problem> {
        let claims = self.records.table().claims_of_pod(pod);
        let refused = self
            .check_idle_claims(claims.iter().map(|claim| &claim.id.uid))
            .await;
        refused.into_values().next().map_or(Ok(()), Err)
    }

    /// Repairs the files of claims and sets their conditions. Returns the claims that must not be answered: without a file, or with a
    /// device that another program's file has too.
    pub(super) async fn check_files(
        &self,
        records: &[Arc<ClaimRecord>],
        nodes: Nodes,
    ) -> BTreeMap<Uid, Problem> {
        let (_, refused) = self.write_files(records).await;
        self.check_written(records, nodes, refused).await
    }

    /// Checks everything but the contents of our files.
    async fn check_written(
        &self,
        records: &[Arc<ClaimRecord>],
        nodes: Nodes,
        mut refused: BTreeMap<Uid, Problem>,
    ) -> BTreeMap<Uid, Problem> {
        self.survey().await;
        let unsafe_sources = self.unsafe_sources(records).await;
        for record in records {
            let (uid, collision) = (&record.id.uid, collision(&self.cdi, record));
            let moved = match nodes {
                Nodes::Unchecked => moved(record, &self.settings.hardware),
                Nodes::Checked => None,
            };
            let unsafe_source = unsafe_sources.get(uid).cloned();
            let problems = [
                refused.get(uid).cloned(),
                collision.clone(),
                missing(&self.cdi, record),
                moved,
                unsafe_source.clone(),
            ];
            self.set_file_conditions(record, problems.into_iter().flatten().collect());
            if let Some(problem) = collision.or(unsafe_source) {
                refused.entry(uid.clone()).or_insert(problem);
            }
        }
        refused
    }

    /// Claims whose container edits name files that others may exchange. Looks in a thread of its own: a file system may hang.
    async fn unsafe_sources(&self, records: &[Arc<ClaimRecord>]) -> BTreeMap<Uid, Problem> {
        let with_sources: Vec<_> = records
            .iter()
            .filter(|record| has_sources(record))
            .cloned()
            .collect();
        if with_sources.is_empty() {
            return BTreeMap::new();
        }
        let (hardware, uids) = (
            self.settings.hardware.clone(),
            with_sources
                .iter()
                .map(|record| record.id.uid.clone())
                .collect::<Vec<_>>(),
        );
        let look = tokio::task::spawn_blocking(move || {
            let found = with_sources.iter().filter_map(|record| {
                Some((record.id.uid.clone(), unsafe_source(record, &hardware)?))
            });
            found.collect()
        });
        match tokio::time::timeout(LOOK_WALL, look).await {
            Ok(Ok(found)) => found,
            Ok(Err(_)) | Err(_) => {
                let message = format!(
                    "a file that container edits name could not be looked at within {LOOK_WALL:?}"
                );
                let stuck = Problem::unavailable(ProblemCode::EditSourceUnsafe, message);
                uids.into_iter().map(|uid| (uid, stuck.clone())).collect()
            }
        }
    }

    /// The same for claims that are prepared already; notes in their history when files of plugins go missing or come back.
    pub(super) async fn check_prepared_files(
        &self,
        records: &[Arc<ClaimRecord>],
        nodes: Nodes,
    ) -> BTreeMap<Uid, Problem> {
        let (rendered, refused) = self.write_files(records).await;
        self.metrics.files_rendered_again.inc_by(rendered);
        let refused = self.check_written(records, nodes, refused).await;
        let noted = records
            .iter()
            .filter_map(|record| self.with_file_note(record))
            .collect::<Vec<_>>();
        if !noted.is_empty()
            && let Err(problem) = self.records.commit_claims(noted).await
        {
            tracing::warn!(%problem, "the state of plugins' CDI files is not in the checkpoint");
        }
        refused
    }

    /// The records, with a note in the history of those whose plugin has not written the files that it named.
    pub(super) async fn with_file_notes(
        &self,
        records: Vec<Arc<ClaimRecord>>,
    ) -> Vec<Arc<ClaimRecord>> {
        if records
            .iter()
            .any(|record| !cdi_names(record, false).is_empty())
        {
            self.survey().await;
        }
        records
            .into_iter()
            .map(|record| self.with_file_note(&record).unwrap_or(record))
            .collect()
    }

    fn with_file_note(&self, record: &Arc<ClaimRecord>) -> Option<Arc<ClaimRecord>> {
        machine::note_files(record, missing(&self.cdi, record), now_ms())
    }

    /// Reads the directories. A directory that cannot be read counts as it was read last.
    pub(super) async fn survey(&self) {
        self.report_survey(self.cdi.survey().await);
    }

    fn report_survey(&self, read: Result<(), CdiError>) {
        match read {
            Ok(()) => self.conditions.clear(ProblemCode::CdiNotRead, DIRECTORIES),
            Err(error) => self.conditions.set(
                DIRECTORIES,
                Problem::unavailable(ProblemCode::CdiNotRead, chain(&error)),
            ),
        }
    }

    /// Sets the conditions about a claim's files, and clears all others.
    pub(super) fn set_file_conditions(&self, record: &ClaimRecord, problems: Vec<Problem>) {
        let mut claims = self.with_conditions.lock();
        if problems.is_empty() && !claims.remove(&record.id.uid) {
            return;
        }
        let subject = format!("claim {}", record.id);
        let cleared = CODES
            .iter()
            .filter(|code| problems.iter().all(|problem| problem.code != **code));
        cleared.for_each(|code| self.conditions.clear(*code, &subject));
        if !problems.is_empty() && claims.insert(record.id.uid.clone()) {
            woken::note();
            self.condition_set.notify_one();
        }
        problems
            .into_iter()
            .for_each(|problem| self.conditions.set(&subject, problem));
    }

    /// Writes the CDI files of claims that are missing or differ from the checkpoint. Returns their number, and the claims for which
    /// that failed.
    async fn write_files(&self, records: &[Arc<ClaimRecord>]) -> (u64, BTreeMap<Uid, Problem>) {
        let mut failed = self.write_metadata(records);
        let mut stale: Vec<(&Uid, Vec<SpecFile>)> = Vec::new();
        for record in records {
            match cdi::render(record) {
                Ok(mut files) => {
                    files.retain(|file| !self.cdi.is_current(file));
                    stale.extend((!files.is_empty()).then_some((&record.id.uid, files)));
                }
                Err(error) => {
                    drop(failed.insert(record.id.uid.clone(), unrendered(record, &error)))
                }
            }
        }
        let all: Vec<_> = stale.iter().flat_map(|(_, files)| files.clone()).collect();
        let mut written = all.len() as u64;
        if self.cdi.write(all).await.is_ok() {
            return (written, failed);
        }
        // One that cannot be written must not fail the others.
        let each = stale.into_iter().map(|(uid, files)| async move {
            let count = files.len() as u64;
            (
                uid,
                self.cdi.write(files).await.map_err(|error| (count, error)),
            )
        });
        for (uid, outcome) in futures::future::join_all(each).await {
            if let Err((count, error)) = outcome {
                written -= count;
                failed.insert(uid.clone(), not_written(&error));
            }
        }
        (written, failed)
    }

    /// Removes files of stale parts: a container that is started again must not get a device that is gone.
    pub(super) async fn remove_stale_files(&self, records: &[Arc<ClaimRecord>]) {
        let mut names = Vec::new();
        for record in records {
            self.remove_metadata(record, stale_drivers(record));
            names.extend(stale_files(record));
        }
        if let Err(error) = self.cdi.remove(names).await {
            tracing::warn!(error = chain(&error), "a stale cdi file stays");
        }
    }

    /// Repairs files until the tasks stop: changed ones, and all of them periodically and when a change may have been missed.
    pub(crate) async fn keep_files(self: Arc<Self>, mut events: mpsc::Receiver<SpecEvent>) {
        let (mut sweep, mut rested) = (Instant::now() + CDI_SWEEP_PERIOD, Instant::now());
        let (mut open, mut locked, mut recheck) = (true, BTreeSet::new(), Recheck::new());
        loop {
            let wake = if locked.is_empty() {
                sweep
            } else {
                sweep.min(Instant::now() + LOCKED_WAIT)
            };
            let wake = recheck.at.map_or(wake, |at| wake.min(at));
            tokio::select! {
                biased;
                // Nothing is lost by stopping: the next start checks every file.
                () = self.tasks.stopped() => return,
                // An event that is not received now stays in the channel.
                event = events.recv(), if open => match event {
                    None => open = false,
                    Some(SpecEvent::Touched(names)) => locked.extend(self.claims_of_files(names).await),
                    Some(SpecEvent::Unsure) => sweep = sweep.min(rested),
                },
                // The permit stays until it is consumed.
                () = self.condition_set.notified() => recheck.restart(),
                () = tokio::time::sleep_until(wake) => {}
            }
            let started = Instant::now();
            if started >= sweep {
                locked.extend(self.sweep_files().await);
                sweep = Instant::now() + CDI_SWEEP_PERIOD;
                rested = Instant::now() + started.elapsed() * SWEEP_REST;
            }
            if recheck.is_due(started) {
                locked.extend(self.with_conditions.lock().clone());
            }
            locked = self.repair_files(locked).await;
            recheck.plan(!self.with_conditions.lock().is_empty());
        }
    }

    /// Finds the claims that changed files are about. Our own writes cost a read of the file.
    pub(crate) async fn claims_of_files(&self, names: BTreeSet<String>) -> BTreeSet<Uid> {
        let names: Vec<_> = names
            .into_iter()
            .filter(|name| !self.cdi.is_as_left(name))
            .collect();
        if names.is_empty() {
            return BTreeSet::new();
        }
        let touched = self.cdi.touched(names.clone()).await;
        self.remove_orphans(touched.ours).await;
        let mut uids = self.with_conditions.lock().clone();
        uids.extend(
            names
                .iter()
                .filter_map(|name| cdi::file_of(name))
                .map(|(_, uid)| uid),
        );
        uids.extend(
            touched
                .devices
                .iter()
                .flat_map(|device| self.claims_of_device(device)),
        );
        uids
    }

    /// Claims that the name of a device of ours may contain, `DRIVER/claim=UID-DEVICE`: a UID may have dashes as well.
    fn claims_of_device(&self, qualified: &str) -> Vec<Uid> {
        let Some((_, device)) = qualified.split_once('=') else {
            return Vec::new();
        };
        let table = self.records.table();
        let prefixes = device.match_indices('-').map(|(at, _)| &device[..at]);
        prefixes
            .filter_map(|prefix| table.claim(prefix))
            .map(|record| record.id.uid.clone())
            .collect()
    }

    /// Repairs the files of claims. Returns the claims that were locked, to be repaired later.
    pub(crate) async fn repair_files(&self, uids: BTreeSet<Uid>) -> BTreeSet<Uid> {
        let mut locked = BTreeSet::new();
        let uids: Vec<_> = uids.into_iter().collect();
        for some in uids.chunks(CDI_CLAIMS_AT_ONCE) {
            if self.tasks.is_stopping() {
                break;
            }
            let taken: Vec<_> = some
                .iter()
                .map(|uid| (uid, self.records.try_lock_claim(uid)))
                .collect();
            let (free, others): (Vec<_>, Vec<_>) =
                taken.iter().partition(|(_, lock)| lock.is_some());
            locked.extend(others.into_iter().map(|(uid, _)| (*uid).clone()));
            let records: Vec<_> = free
                .iter()
                .filter_map(|(uid, _)| self.claim_with_files(uid))
                .collect();
            failpoint::pass(Point::ReconcileClaim);
            self.check_prepared_files(&records, Nodes::Unchecked).await;
            self.remove_stale_files(&records).await;
        }
        locked
    }

    /// Repairs the files of those claims that are not locked. Returns the claims that must not be answered.
    pub(super) async fn check_idle_claims(
        &self,
        uids: impl Iterator<Item = &Uid>,
    ) -> BTreeMap<Uid, Problem> {
        let locks: Vec<_> = uids
            .filter_map(|uid| Some((uid, self.records.try_lock_claim(uid)?)))
            .collect();
        let records: Vec<_> = locks
            .iter()
            .filter_map(|(uid, _)| self.claim_with_files(uid))
            .collect();
        self.check_prepared_files(&records, Nodes::Unchecked).await
    }

    /// A claim whose files have to be right. The conditions of any other are cleared.
    fn claim_with_files(&self, uid: &Uid) -> Option<Arc<ClaimRecord>> {
        let record = self.records.table().claim(uid.as_str()).cloned()?;
        if self.needs_files(&record) {
            return Some(record);
        }
        self.set_file_conditions(&record, Vec::new());
        None
    }

    /// Checks all files of all claims. Returns the claims that have to be repaired.
    pub(crate) async fn sweep_files(&self) -> BTreeSet<Uid> {
        let records: Vec<_> = {
            let table = self.records.table();
            table
                .claims()
                .filter(|record| self.needs_files(record))
                .cloned()
                .collect()
        };
        let (cdi, metadata, settings) = (
            self.cdi.clone(),
            self.metadata.clone(),
            self.settings.clone(),
        );
        // Renders every claim and reads every file: not for a thread that serves requests.
        match tokio::task::spawn_blocking(move || find_wrong(&cdi, &metadata, &settings, &records))
            .await
        {
            Ok((wrong, surveyed)) => {
                self.report_survey(surveyed);
                self.remove_orphans(self.cdi.strays()).await;
                self.remove_metadata_orphans();
                wrong
                    .into_iter()
                    .chain(self.with_conditions.lock().clone())
                    .collect()
            }
            Err(error) => {
                tracing::error!(error = chain(&error), "cdi files not checked");
                BTreeSet::new()
            }
        }
    }

    /// Removes files of ours that belong to no claim: those of unknown claims, and copies under other names.
    async fn remove_orphans(&self, names: Vec<String>) {
        for name in names {
            if cdi::file_of(&name).is_some_and(|(driver, uid)| self.records.has_part(&uid, &driver))
            {
                continue;
            }
            // A file whose identity was written by a newer release is kept.
            let file = match self.cdi.read(&name).await {
                Ok(file) => file,
                Err(error) => {
                    tracing::warn!(
                        error = chain(&error),
                        "a cdi file stays: whether a claim owns it is unknown"
                    );
                    continue;
                }
            };
            let Some(identity) = file.and_then(|file| file.identity) else {
                continue;
            };
            let uid = identity.claim.uid;
            // Under its claim's lock: a pod may just be requesting it.
            let Some(_claim) = self.records.try_lock_claim(&uid) else {
                continue;
            };
            let known = self.records.table().is_known(uid.as_str());
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

    /// Removes the files of claims that end.
    pub(super) async fn remove_files(&self, gone: &[Arc<ClaimRecord>]) -> Result<(), Problem> {
        let mut names = Vec::new();
        for record in gone {
            let drivers = record.allocation.drivers();
            self.remove_metadata(record, drivers.iter().copied());
            names.extend(
                drivers
                    .iter()
                    .map(|name| cdi::file_name(name, &record.id.uid)),
            );
        }
        self.remove_cdi_files(names).await
    }

    /// Removes the files of some drivers' parts of a claim.
    pub(super) async fn remove_files_of(
        &self,
        record: &ClaimRecord,
        drivers: &[DriverName],
    ) -> Result<(), Problem> {
        self.remove_metadata(record, drivers);
        let names = drivers
            .iter()
            .map(|name| cdi::file_name(name, &record.id.uid))
            .collect();
        self.remove_cdi_files(names).await
    }

    async fn remove_cdi_files(&self, names: Vec<String>) -> Result<(), Problem> {
        match self.cdi.remove(names).await {
            // A file of another program under our name: ours is gone.
            Ok(()) | Err(CdiError::Foreign(_)) => {}
            Err(error) => {
                let message = format!("remove CDI files: {}", chain(&error));
                return Err(Problem::unavailable(ProblemCode::CdiNotRemoved, message));
            }
        }
        failpoint::pass(Point::UnprepareFilesRemoved);
        Ok(())
    }

    fn needs_files(&self, record: &ClaimRecord) -> bool {
        record.boot_id == self.settings.boot_id && record.state != ClaimState::Unpreparing
    }
}

/// The claims whose files are not right. Blocks.
fn find_wrong(
    cdi: &CdiDir,
    metadata: &MetadataDir,
    settings: &FileSettings,
    records: &[Arc<ClaimRecord>],
) -> (Vec<Uid>, Result<(), CdiError>) {
    let surveyed = cdi.survey_all();
    let wrong = records.iter().filter(|record| {
        !cdi::render(record).is_ok_and(|files| files.iter().all(|file| cdi.is_current(file)))
            || !wrong_files(metadata, &settings.metadata, record).is_empty()
            || collision(cdi, record).is_some()
            || missing(cdi, record).is_some()
            || moved(record, &settings.hardware).is_some()
            || unsafe_source(record, &settings.hardware).is_some()
            || stale_drivers(record).next().is_some()
    });
    (
        wrong.map(|record| record.id.uid.clone()).collect(),
        surveyed,
    )
}

/// Drivers that prepared the claim in this boot, and whose result is stale.
fn stale_drivers(record: &ClaimRecord) -> impl Iterator<Item = &DriverName> {
    let stale = record
        .drivers
        .iter()
        .filter(|(_, part)| part.stale && part.prepared_in == record.boot_id);
    stale.map(|(driver, _)| driver)
}

fn stale_files(record: &ClaimRecord) -> impl Iterator<Item = String> {
    stale_drivers(record).map(|driver| cdi::file_name(driver, &record.id.uid))
}

/// The CDI names of a claim's devices: of those in our files, or of those in files that plugins write.
fn cdi_names(record: &ClaimRecord, ours: bool) -> Vec<String> {
    let devices = record
        .drivers
        .keys()
        .flat_map(|driver| cdi::cdi_devices(record, driver));
    let names = devices.flat_map(|(device, mut names)| {
        // Our own name comes first.
        let theirs = names.split_off(usize::from(device.access.edits().is_some()));
        if ours { names } else { theirs }
    });
    names.collect()
}

/// A file of another program that has a device of the claim as well: a runtime would refuse the device, or use that file.
fn collision(cdi: &CdiDir, record: &ClaimRecord) -> Option<Problem> {
    let found = cdi
        .collisions(&cdi_names(record, true))
        .into_iter()
        .next()?;
    let (file, device) = (found.file.display(), &found.device);
    let message = format!(
        "{file} has the CDI device {device} of claim {} as well: container runtimes refuse a device that two files have; remove the other file",
        record.id
    );
    Some(
        Problem::conflict(ProblemCode::CdiDeviceClaimedTwice, message)
            .with("file", file)
            .with("device", device),
    )
}

/// Devices of a native plugin that are in no file. The plugin may write it a moment later, so the claim is answered.
fn missing(cdi: &CdiDir, record: &ClaimRecord) -> Option<Problem> {
    let names = cdi_names(record, false);
    let missing = if names.is_empty() {
        Vec::new()
    } else {
        cdi.missing(&names)
    };
    let first = missing.first()?;
    let message = format!(
        "no CDI file has {}, which the plugin of claim {} named: it writes these files itself",
        name_few(missing.iter(), DEVICES_NAMED_MAX),
        record.id
    );
    Some(Problem::unavailable(ProblemCode::CdiDeviceMissing, message).with("device", first))
}

/// A device node that differs from the claim's file. The file stays: runtimes that start a container again may need it, and the next prepare
/// calls the driver.
fn moved(record: &ClaimRecord, hardware: &Hardware) -> Option<Problem> {
    let mut parts = record.drivers.iter();
    let (driver, Moved { path, then, now }) =
        parts.find_map(|(driver, part)| Some((driver, first_moved(part.current()?, hardware)?)))?;
    let message = format!(
        "the device node {path} of claim {} was {then} when driver {driver} prepared it, and is {now}: a container that is started again may get a wrong device; the claim is prepared again when a pod requests it",
        record.id
    );
    let problem = Problem::unavailable(ProblemCode::DeviceNodeMoved, message).with("node", path);
    Some(
        problem
            .with("driver", driver)
            .with("then", then)
            .with("now", now),
    )
}

/// Returns whether container edits of a driver name files of the node.
fn has_sources(record: &ClaimRecord) -> bool {
    let mut prepared = record.drivers.values().filter_map(|part| part.current());
    prepared.any(edit_sources::has_sources)
}

/// The source of a mount, or the program of a hook, that others may exchange now, or that is something else than it was. A response would repeat its path.
fn unsafe_source(record: &ClaimRecord, hardware: &Hardware) -> Option<Problem> {
    let sources = EditSources::of(hardware);
    // A native plugin is root's, and so are the paths that it names.
    let checked = record.drivers.iter().filter(|(_, part)| {
        part.by
            .as_ref()
            .is_none_or(|by| by.kind == DriverKind::Wasm)
    });
    let mut parts = checked.filter_map(|(driver, part)| Some((driver, part.current()?)));
    parts.find_map(|(driver, prepared)| {
        let problem = sources.check_claim(prepared).err()?;
        let message = format!(
            "container edits of claim {}, from driver {driver}: {}",
            record.id, problem.message
        );
        // What others change, others may change back.
        let unsafe_source = Problem::unavailable(ProblemCode::EditSourceUnsafe, message);
        Some(
            unsafe_source
                .with("driver", driver)
                .with("cause", problem.code),
        )
    })
}

fn not_written(error: &CdiError) -> Problem {
    let message = format!("write CDI files: {}", chain(error));
    match error {
        CdiError::Foreign(file) => {
            Problem::conflict(ProblemCode::CdiFileForeign, message).with("file", file)
        }
        _ => Problem::unavailable(ProblemCode::CdiNotWritten, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Claims that got conditions one after the other, each within a second of the one before, postponed the check of all of them until the
    /// periodic sweep.
    #[tokio::test(start_paused = true)]
    async fn new_conditions_do_not_postpone_checks() {
        let mut recheck = Recheck::new();
        recheck.plan(true);
        let (step, mut due) = (CDI_RETRY_MIN * 3 / 4, Vec::new());
        for _ in 0..6 {
            tokio::time::advance(step).await;
            recheck.restart();
            due.push(recheck.is_due(Instant::now()));
            recheck.plan(true);
        }
        assert_eq!(due, [false, true, false, false, true, false]);
        recheck.plan(false);
        assert_eq!(recheck.at, None, "no condition is left");
    }
}
