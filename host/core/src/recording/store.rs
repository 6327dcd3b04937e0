//! Recorded drivers, and the thread that writes their rings.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::oneshot;

use super::ring::{self, Ring, SEGMENTS, Segment};
use super::{Line, Raw, RecordedCall, Revision};

/// Bytes of lines that wait for the disk; more are lost and counted.
const WAITING_BYTES_MAX: usize = 32 << 20;

#[derive(Debug, thiserror::Error)]
pub enum RecordingsError {
    #[error("{action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "{0} is not recorded: name it under `recording.drivers` in the config, or give a time to record"
    )]
    NotRecorded(String),
    #[error(
        "the daemon has had no driver or device plugin {0:?} since it started: `nodedock get drivers` lists those that it has"
    )]
    Unknown(String),
    #[error("{0:?} cannot be the name of a driver or of an extended resource")]
    Name(String),
    #[error("the recordings of this daemon have ended")]
    Ended,
}

/// The recordings of a daemon. The default records nothing, ever. Clones share the state.
#[derive(Debug, Clone, Default)]
pub struct Recordings(Option<Arc<RecordingStore>>);

#[derive(Debug)]
struct RecordingStore {
    /// Locked after the switches.
    configured: Mutex<BTreeSet<String>>,
    bytes_max: u64,
    queue: Sender<Command>,
    waiting: Arc<AtomicUsize>,
    switches: Mutex<BTreeMap<String, Arc<Switch>>>,
}

/// Switch that turns the recording of a driver on and off.
#[derive(Debug)]
struct Switch {
    driver: String,
    is_on: AtomicBool,
    /// The config and the temporary recordings that require it. Under its lock, removals are queued.
    wanted: Mutex<usize>,
    /// Calls that were not recorded since the last one that was.
    lost: AtomicU64,
    /// Bytes of a line.
    line_bytes_max: usize,
    queue: Sender<Command>,
    waiting: Arc<AtomicUsize>,
}

enum Command {
    Append {
        switch: Arc<Switch>,
        revision: Arc<Revision>,
        line: Vec<u8>,
    },
    Read {
        switch: Arc<Switch>,
        recorded: oneshot::Sender<io::Result<Recorded>>,
    },
    Remove {
        switch: Arc<Switch>,
    },
}

/// Recording of a driver.
#[derive(Debug)]
pub struct Recorded {
    /// The oldest first.
    pub segments: Vec<Segment>,
    /// Calls that are missing after the last one in them.
    pub lost: u64,
}

impl Recordings {
    /// Starts to record the named drivers below a directory, each within these bytes. What is there of others is removed.
    pub fn start(
        directory: &Path,
        drivers: impl IntoIterator<Item = String>,
        bytes_max: u64,
    ) -> Result<Self, RecordingsError> {
        let configured: BTreeSet<_> = drivers.into_iter().collect();
        // On a disk that cannot be written the daemon serves, and records nothing.
        if let Err(error) = remove_others(directory, &configured) {
            let directory = directory.display();
            tracing::warn!(%directory, %error, "old recordings cannot be removed");
        }
        let (queue, commands) = mpsc::channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let writer = Writer {
            directory: directory.to_owned(),
            bytes_max,
            rings: BTreeMap::new(),
            waiting: Arc::clone(&waiting),
            is_failing: false,
        };
        // A thread and not a task: it waits for the disk. It ends when the last recorder is dropped.
        let spawned = std::thread::Builder::new()
            .name("recordings".into())
            .spawn(|| writer.run(commands));
        spawned.map_err(|source| RecordingsError::Io {
            action: "start the thread that writes",
            path: directory.to_owned(),
            source,
        })?;
        let switches = Mutex::default();
        Ok(Self(Some(Arc::new(RecordingStore {
            configured: Mutex::new(configured),
            bytes_max,
            queue,
            waiting,
            switches,
        }))))
    }

    /// Returns the recorder of a driver, or of a device plugin by its extended resource. All recorders of a name share one ring.
    pub fn recorder(&self, driver: &str) -> Recorder {
        Recorder(self.0.as_ref().map(|shared| shared.switch(driver)))
    }

    /// Records a driver that had a recorder, or that the config names, until the result is dropped. Its ring is removed then, if the
    /// config does not name it.
    pub fn begin(&self, driver: &str) -> Result<TemporaryRecording, RecordingsError> {
        let shared = self.shared()?;
        check_name(driver)?;
        let switch = shared
            .known(driver)
            .ok_or_else(|| RecordingsError::Unknown(driver.to_owned()))?;
        switch.want();
        Ok(TemporaryRecording(switch))
    }

    /// Records the named drivers from now on. The rings of others are removed, unless a temporary recording requires them.
    pub fn configure(&self, drivers: impl IntoIterator<Item = String>) {
        let Some(shared) = &self.0 else { return };
        let now: BTreeSet<_> = drivers.into_iter().collect();
        let switches = shared.switches.lock();
        let before = std::mem::replace(&mut *shared.configured.lock(), now.clone());
        for (driver, switch) in switches.iter() {
            match (before.contains(driver), now.contains(driver)) {
                (false, true) => switch.want(),
                (true, false) => switch.release(),
                _ => {}
            }
        }
    }

    /// Returns what was recorded until now of a driver that is recorded.
    pub async fn read(&self, driver: &str) -> Result<Recorded, RecordingsError> {
        let shared = self.shared()?;
        check_name(driver)?;
        let switch = shared
            .known(driver)
            .filter(|switch| switch.is_on.load(Ordering::Relaxed));
        let switch = switch.ok_or_else(|| RecordingsError::NotRecorded(driver.to_owned()))?;
        let (recorded, read) = oneshot::channel();
        shared
            .queue
            .send(Command::Read { switch, recorded })
            .map_err(|_| RecordingsError::Ended)?;
        read.await
            .map_err(|_| RecordingsError::Ended)?
            .map_err(|source| RecordingsError::Io {
                action: "read the recording of",
                path: driver.into(),
                source,
            })
    }

    fn shared(&self) -> Result<&Arc<RecordingStore>, RecordingsError> {
        self.0.as_ref().ok_or(RecordingsError::Ended)
    }
}

impl RecordingStore {
    /// Returns the switch of a driver that had a recorder, or that the config names.
    fn known(&self, driver: &str) -> Option<Arc<Switch>> {
        if self.configured.lock().contains(driver) {
            return Some(self.switch(driver));
        }
        self.switches.lock().get(driver).cloned()
    }

    fn switch(&self, driver: &str) -> Arc<Switch> {
        let mut switches = self.switches.lock();
        if let Some(switch) = switches.get(driver) {
            return Arc::clone(switch);
        }
        let is_configured = self.configured.lock().contains(driver);
        let switch = Arc::new(Switch {
            driver: driver.to_owned(),
            is_on: AtomicBool::new(is_configured),
            wanted: Mutex::new(is_configured.into()),
            lost: AtomicU64::new(0),
            line_bytes_max: usize::try_from(self.bytes_max / SEGMENTS).unwrap_or(usize::MAX),
            queue: self.queue.clone(),
            waiting: Arc::clone(&self.waiting),
        });
        switches.insert(driver.to_owned(), Arc::clone(&switch));
        switch
    }
}

/// A recording for a while.
#[derive(Debug)]
pub struct TemporaryRecording(Arc<Switch>);

impl Drop for TemporaryRecording {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Records the calls of one driver. The default records nothing.
#[derive(Debug, Clone, Default)]
pub struct Recorder(Option<Arc<Switch>>);

impl Recorder {
    /// Returns whether calls are recorded now.
    pub fn is_on(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|switch| switch.is_on.load(Ordering::Relaxed))
    }

    /// Returns how many bytes the line of a call may have.
    pub fn line_bytes_max(&self) -> usize {
        self.0.as_ref().map_or(0, |switch| switch.line_bytes_max)
    }

    /// Records a call. Never waits: a call for which there is no room is lost and counted.
    pub fn record(&self, revision: &Arc<Revision>, call: RecordedCall<Raw>) {
        let Some(switch) = &self.0 else { return };
        let lost = switch.lost.swap(0, Ordering::Relaxed);
        if lost > 0 && !switch.send(revision, &Line::<Raw>::Lost(lost)) {
            switch.lost.fetch_add(lost, Ordering::Relaxed);
        }
        if !switch.send(revision, &Line::Call(call)) {
            self.lose();
        }
    }

    /// Counts a call that is not recorded.
    pub fn lose(&self) {
        if let Some(switch) = &self.0 {
            switch.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Switch {
    fn want(self: &Arc<Self>) {
        let mut wanted = self.wanted.lock();
        if *wanted == 0 {
            // What calls of an earlier recording left, which ended after it.
            self.remove();
        }
        *wanted += 1;
        self.is_on.store(true, Ordering::Relaxed);
    }

    fn release(self: &Arc<Self>) {
        let mut wanted = self.wanted.lock();
        *wanted -= 1;
        if *wanted == 0 {
            self.is_on.store(false, Ordering::Relaxed);
            self.remove();
        }
    }

    fn remove(self: &Arc<Self>) {
        // An error: the thread has ended, and the next start removes the ring.
        let _ = self.queue.send(Command::Remove {
            switch: Arc::clone(self),
        });
    }

    /// Returns whether the line will be written, as far as is known.
    fn send(self: &Arc<Self>, revision: &Arc<Revision>, line: &Line<Raw>) -> bool {
        let Some(line) = text(line).filter(|line| line.len() <= self.line_bytes_max) else {
            return false;
        };
        let bytes = line.len();
        if self.waiting.fetch_add(bytes, Ordering::Relaxed) + bytes > WAITING_BYTES_MAX {
            self.waiting.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        let command = Command::Append {
            switch: Arc::clone(self),
            revision: Arc::clone(revision),
            line,
        };
        self.queue.send(command).is_ok()
    }
}

fn text(line: &impl Serialize) -> Option<Vec<u8>> {
    let mut text = serde_json::to_vec(line).ok()?;
    text.push(b'\n');
    Some(text)
}

/// Writes the rings.
struct Writer {
    directory: PathBuf,
    bytes_max: u64,
    rings: BTreeMap<String, Ring>,
    waiting: Arc<AtomicUsize>,
    /// The last write failed: only the first failure is logged.
    is_failing: bool,
}

impl Writer {
    fn run(mut self, commands: Receiver<Command>) {
        for command in commands {
            match command {
                Command::Append {
                    switch,
                    revision,
                    line,
                } => self.append(&switch, &revision, &line),
                // An error: the reader is gone.
                Command::Read { switch, recorded } => {
                    let lost = switch.lost.load(Ordering::Relaxed);
                    let segments = self.ring(&switch.driver).segments();
                    drop(recorded.send(segments.map(|segments| Recorded { segments, lost })))
                }
                Command::Remove { switch } => {
                    if let Err(error) = self.ring(&switch.driver).remove() {
                        tracing::warn!(driver = switch.driver, %error, "a recording cannot be removed");
                    }
                }
            }
        }
    }

    fn append(&mut self, switch: &Switch, revision: &Arc<Revision>, line: &[u8]) {
        let written = self.ring(&switch.driver).append(revision, line);
        self.waiting.fetch_sub(line.len(), Ordering::Relaxed);
        match written {
            Ok(()) => self.is_failing = false,
            Err(error) => {
                switch.lost.fetch_add(1, Ordering::Relaxed);
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(driver = switch.driver, %error, "a call cannot be recorded; the next failures are only counted");
                }
            }
        }
    }

    fn ring(&mut self, driver: &str) -> &mut Ring {
        let (directory, bytes_max) = (&self.directory, self.bytes_max);
        self.rings
            .entry(driver.to_owned())
            .or_insert_with(|| Ring::new(directory.join(directory_name(driver)), bytes_max))
    }
}

/// The directory of a driver. Only the name of an extended resource has a slash, and no name has an underscore before it.
fn directory_name(driver: &str) -> String {
    driver.replacen('/', "_", 1)
}

/// Checks that a name is one path segment, once its slash is replaced.
fn check_name(driver: &str) -> Result<(), RecordingsError> {
    let name = directory_name(driver);
    if name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_'))
    {
        return Ok(());
    }
    Err(RecordingsError::Name(driver.to_owned()))
}

fn remove_others(directory: &Path, configured: &BTreeSet<String>) -> io::Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let kept: BTreeSet<_> = configured
        .iter()
        .map(|driver| directory_name(driver))
        .collect();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir()
            && !entry
                .file_name()
                .to_str()
                .is_some_and(|name| kept.contains(name))
        {
            ring::remove(&entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::{CallOutcome, raw};

    const GPU: &str = "gpu.example.com";

    fn a_call(request: &str) -> RecordedCall<Raw> {
        RecordedCall {
            operation: "prepare".into(),
            request: request.to_owned(),
            at_ms: 1,
            arguments: raw(&()),
            host: Vec::new(),
            answer: CallOutcome::Returned(raw(&())),
            has_values_left_out: false,
        }
    }

    async fn lines(recordings: &Recordings, driver: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for segment in recordings.read(driver).await.unwrap().segments {
            let text = String::from_utf8(segment.read().unwrap()).unwrap();
            lines.extend(text.lines().skip(1).map(str::to_owned));
        }
        lines
    }

    fn start(directory: &Path, drivers: &[&str]) -> Recordings {
        Recordings::start(directory, drivers.iter().map(ToString::to_string), 1 << 16).unwrap()
    }

    #[tokio::test]
    async fn changed_config_starts_and_ends_recordings() {
        let directory = tempfile::tempdir().unwrap();
        let revision = Arc::new(Revision::native(GPU));
        let recordings = start(directory.path(), &[]);
        let recorder = recordings.recorder(GPU);
        recorder.record(&revision, a_call("r-1"));
        for round in ["r-2", "r-3"] {
            recordings.configure([GPU.to_owned()]);
            assert!(recorder.is_on() && recordings.recorder(GPU).is_on());
            recorder.record(&revision, a_call(round));
            let lines = lines(&recordings, GPU).await;
            assert!(
                lines.len() == 1 && lines[0].contains(round),
                "the ring before is removed: {lines:?}"
            );
            recordings.configure([]);
            assert!(!recorder.is_on() && recordings.read(GPU).await.is_err());
        }
        // A recording for a while stays, and one that the config names does.
        let temporary = recordings.begin(GPU).unwrap();
        recordings.configure([GPU.to_owned()]);
        recordings.configure([]);
        assert!(recorder.is_on());
        recordings.configure([GPU.to_owned()]);
        drop(temporary);
        assert!(recorder.is_on());
        Recordings::default().configure([GPU.to_owned()]);
    }

    #[tokio::test]
    async fn only_configured_drivers_are_recorded() {
        let directory = tempfile::tempdir().unwrap();
        let revision = Arc::new(Revision::native(GPU));
        {
            let recordings = start(directory.path(), &[GPU]);
            let recorder = recordings.recorder(GPU);
            assert!(recorder.is_on() && !recordings.recorder("other.example.com").is_on());
            recorder.record(&revision, a_call("r-1"));
            assert!(lines(&recordings, GPU).await[0].contains("r-1"));
            let refused = recordings
                .read("other.example.com")
                .await
                .unwrap_err()
                .to_string();
            assert!(
                refused.contains("other.example.com is not recorded"),
                "{refused}"
            );
            let refused = recordings.read("../x").await.unwrap_err().to_string();
            assert!(refused.contains("cannot be the name"), "{refused}");
        }
        let again = start(directory.path(), &[GPU]);
        assert_eq!(lines(&again, GPU).await.len(), 1);
        let none = start(directory.path(), &[]);
        assert!(none.read(GPU).await.is_err() && !directory.path().join(GPU).exists());
        assert!(!Recorder::default().is_on());
    }

    #[tokio::test]
    async fn temporary_recording_ends_with_guard() {
        let directory = tempfile::tempdir().unwrap();
        let recordings = start(directory.path(), &[]);
        let (resource, revision) = (
            "example.com/gpu",
            Arc::new(Revision::native("example.com/gpu")),
        );
        let recorder = recordings.recorder(resource);
        let [one, two] = [(); 2].map(|()| recordings.begin(resource).unwrap());
        drop(one);
        assert!(recorder.is_on());
        recorder.record(&revision, a_call("r-1"));
        assert_eq!(lines(&recordings, resource).await.len(), 1);
        drop(two);
        assert!(!recorder.is_on());
        // A read after the removal, which is done in order.
        let _third = recordings.begin(resource).unwrap();
        assert!(lines(&recordings, resource).await.is_empty());
        // A name that was never a driver's would be recorded in vain. To read it does not make it known.
        assert!(recordings.read("example.com/gpus").await.is_err());
        let unknown = recordings
            .begin("example.com/gpus")
            .unwrap_err()
            .to_string();
        assert!(
            unknown.contains("no driver or device plugin \"example.com/gpus\""),
            "{unknown}"
        );
    }

    #[tokio::test]
    async fn lost_calls_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        let recordings = start(directory.path(), &[GPU]);
        let (recorder, revision) = (recordings.recorder(GPU), Arc::new(Revision::native(GPU)));
        let large = RecordedCall {
            arguments: raw(&"x".repeat(1 << 13)),
            ..a_call("r-1")
        };
        recorder.record(&revision, large);
        recorder.lose();
        let recorded = recordings.read(GPU).await.unwrap();
        assert_eq!(
            (recorded.segments.len(), recorded.lost),
            (0, 2),
            "no call comes after them"
        );
        recorder.record(&revision, a_call("r-2"));
        let lines = lines(&recordings, GPU).await;
        assert_eq!((lines.len(), lines[0].as_str()), (2, "{\"lost\":2}"));
    }
}
