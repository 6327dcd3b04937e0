//! Writes below `/sys` by a driver: durable as intents before they are made, within grant and ceiling, and in the audit log.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Mutex;

use async_trait::async_trait;

use super::guest::{PREPARE_ONE, WRITE_IMPORT, write_call, write_data};
use super::*;
use crate::host_functions::writes::WRITES_PER_CALL;
use nodedock_base::locks::LockGuard;
use nodedock_core::driver::ClaimDriver;
use nodedock_core::driver::values::Write;
use nodedock_model::{Problem, Uid};

const LED: &str = "class/led/brightness";

/// Records each call, and the content of the file at that time.
#[derive(Default)]
struct Notes {
    lines: Mutex<Vec<String>>,
    file: Mutex<Option<std::path::PathBuf>>,
    refuses: bool,
    /// While a write waits for its lock, the grant of this driver is revoked.
    revoked: Mutex<Option<Arc<WasmDriver>>>,
}

impl Notes {
    fn note(&self, line: String) {
        self.lines.lock().unwrap().push(line);
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    fn content(&self) -> String {
        let file = self.file.lock().unwrap();
        file.as_ref()
            .map(|file| std::fs::read_to_string(file).unwrap())
            .unwrap_or_default()
    }
}

#[async_trait]
impl Journal for Notes {
    async fn lock_path(&self, _: &str) -> Vec<LockGuard<String>> {
        self.revoked
            .lock()
            .unwrap()
            .iter()
            .for_each(|driver| driver.revoke());
        Vec::new()
    }

    async fn intend(&self, write: &Write<'_>) -> Result<(), Problem> {
        let claims: Vec<_> = write
            .claims
            .iter()
            .map(|claim| claim.uid.as_str())
            .collect();
        let (driver, claims, path, value) =
            (write.driver, claims.join(","), write.path, write.value);
        let before = write.before.unwrap_or("?");
        self.note(format!(
            "{driver} {claims} {path} {before} -> {value}, while it is {}",
            self.content().trim()
        ));
        match self.refuses {
            true => Err(Problem::unavailable("checkpoint-disk-full", "not now")),
            false => Ok(()),
        }
    }

    fn before(&self, _: &DriverName, _: &[ObjectRef], _: &str) -> Option<(u64, String)> {
        None
    }

    async fn save_progress(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        progress: Vec<u8>,
    ) -> Result<(), Problem> {
        self.note(format!(
            "{driver} {} saves {}",
            claim.uid,
            String::from_utf8_lossy(&progress)
        ));
        match self.refuses {
            true => Err(Problem::unavailable("checkpoint-disk-full", "not now")),
            false => Ok(()),
        }
    }

    fn progress(&self, _: &DriverName) -> BTreeMap<Uid, Vec<u8>> {
        BTreeMap::new()
    }

    fn settle(&self, _: &Write<'_>, value: Option<String>) {
        self.note(format!("{value:?}, and it is {}", self.content().trim()));
    }
}

fn node(directory: &Path) {
    let led = directory.join("sys/devices/led");
    std::fs::create_dir_all(&led).unwrap();
    std::fs::create_dir_all(directory.join("sys/class")).unwrap();
    std::fs::write(led.join("brightness"), "0\n").unwrap();
    std::os::unix::fs::symlink("../devices/led", directory.join("sys/class/led")).unwrap();
}

fn stage(refuses: bool) -> (Stage, Arc<Notes>) {
    let directory = tempfile::tempdir().unwrap();
    node(directory.path());
    let file = directory.path().join("sys/devices/led/brightness");
    let notes = Arc::new(Notes {
        file: Mutex::new(Some(file)),
        refuses,
        ..Notes::default()
    });
    (Stage::keeping(directory, false, notes.clone()), notes)
}

fn led(stage: &Stage) -> String {
    std::fs::read_to_string(stage.directory.path().join("sys/devices/led/brightness")).unwrap()
}

/// A driver that writes when it prepares, and then runs `then`.
fn writer(path: &'static str, value: &'static str, times: usize, then: &str) -> Guest {
    Guest {
        imports: WRITE_IMPORT.to_owned(),
        extra: write_data(path, value),
        prepare: format!("{} {then}", write_call(path, value).repeat(times)),
        sysfs_write: Some(("class/led/brightness", "[0-9]+")),
        ..Guest::default()
    }
}

const GRANT: &str = "sysfsWrite: [{glob: \"class/led/brightness\", pattern: \"[0-9]+\"}]";

async fn prepare(stage: &Stage, guest: &Guest, grant: &str) -> bool {
    let driver = stage.try_load(guest.module(), grant).await.unwrap();
    driver.prepare(&a_call(), &[a_claim("u-1")]).await["u-1"].is_ok()
}

#[tokio::test]
async fn intent_is_stored_before_the_write() {
    let (stage, notes) = stage(false);
    assert!(prepare(&stage, &writer(LED, "5", 1, PREPARE_ONE), GRANT).await);
    let expected = [
        "tiny.example.com u-1 devices/led/brightness 0 -> 5, while it is 0",
        "Some(\"5\"), and it is 5",
    ];
    assert_eq!(
        (notes.lines().as_slice(), led(&stage).as_str()),
        (&expected.map(str::to_owned)[..], "5\n")
    );
}

#[tokio::test]
async fn write_without_intent_is_not_made() {
    let (stage, notes) = stage(true);
    assert!(prepare(&stage, &writer(LED, "5", 1, PREPARE_ONE), GRANT).await);
    assert_eq!((notes.lines().len(), led(&stage).as_str()), (1, "0\n"));
    let bare = tempfile::tempdir().unwrap();
    node(bare.path());
    let stage = Stage::on(bare, false);
    assert!(prepare(&stage, &writer(LED, "5", 1, PREPARE_ONE), GRANT).await);
    assert_eq!(led(&stage), "0\n", "there is no journal");
}

#[tokio::test]
async fn revoked_grant_stops_a_waiting_write() {
    let (stage, notes) = stage(false);
    let driver = Arc::new(
        stage
            .try_load(writer(LED, "5", 1, PREPARE_ONE).module(), GRANT)
            .await
            .unwrap(),
    );
    *notes.revoked.lock().unwrap() = Some(driver.clone());
    driver.prepare(&a_call(), &[a_claim("u-1")]).await;
    let expected = [
        "tiny.example.com u-1 devices/led/brightness 0 -> 5, while it is 0",
        "None, and it is 0",
    ];
    assert_eq!(
        (notes.lines().as_slice(), led(&stage).as_str()),
        (&expected.map(str::to_owned)[..], "0\n")
    );
}

#[tokio::test]
async fn write_before_a_trap_is_journaled() {
    let (stage, notes) = stage(false);
    assert!(!prepare(&stage, &writer(LED, "5", 1, "unreachable"), GRANT).await);
    assert_eq!((notes.lines().len(), led(&stage).as_str()), (2, "5\n"));
}

#[tokio::test]
async fn writes_beyond_grant_are_refused() {
    let half = "sysfsWrite: [{glob: \"class/led/brightness\", pattern: \"[0-4]\"}]";
    for (path, value, grant) in [
        (LED, "5", ""),
        (LED, "5", half),
        (LED, "x", GRANT),
        ("class/led/../led/brightness", "5", GRANT),
        ("class/led/power/control", "5", GRANT),
        ("devices/led/brightness", "5", GRANT),
        ("class/none", "5", GRANT),
    ] {
        let (stage, notes) = stage(false);
        std::fs::create_dir(stage.directory.path().join("sys/devices/led/power")).unwrap();
        std::fs::write(
            stage.directory.path().join("sys/devices/led/power/control"),
            "0\n",
        )
        .unwrap();
        assert!(prepare(&stage, &writer(path, value, 1, PREPARE_ONE), grant).await);
        let control = stage.directory.path().join("sys/devices/led/power/control");
        assert_eq!(std::fs::read_to_string(control).unwrap(), "0\n");
        assert_eq!(
            (notes.lines().len(), led(&stage).as_str()),
            (0, "0\n"),
            "{path} {value} {grant}"
        );
    }
    // A discovery may not write, even with a grant.
    let (stage, notes) = stage(false);
    let mut guest = writer(LED, "5", 1, PREPARE_ONE);
    guest.discover = format!("{} i32.const 8192", write_call(LED, "5"));
    let driver = stage.try_load(guest.module(), GRANT).await.unwrap();
    driver.discover(&a_call(), Trigger::Load).await.unwrap();
    assert_eq!((notes.lines().len(), led(&stage).as_str()), (0, "0\n"));
}

#[tokio::test]
async fn writes_per_call_are_bounded() {
    let (stage, notes) = stage(false);
    let guest = writer(LED, "5", WRITES_PER_CALL + 4, PREPARE_ONE);
    let driver = stage.try_load(guest.module(), GRANT).await.unwrap();
    assert!(driver.prepare(&a_call(), &[a_claim("u-1")]).await["u-1"].is_ok());
    assert_eq!(notes.lines().len(), 2 * WRITES_PER_CALL);
    assert_eq!(
        driver.stats().refusals(Limit::SysfsWrites).get(),
        1,
        "once for the call"
    );
}

/// A driver that saves bytes for a claim when it prepares.
fn saver(uid: &'static str, bytes: usize) -> Guest {
    let call = format!(
        "(call $save (i32.const 12800) (i32.const {}) (i32.const 20000) (i32.const {bytes}) (i32.const 13056))",
        uid.len()
    );
    Guest {
        imports:
            "(import \"nodedock:driver/progress@0.2.0\" \"save\" (func $save (param i32 i32 i32 i32 i32)))"
                .into(),
        extra: format!("(data (i32.const 12800) \"{uid}\") (data (i32.const 20000) \"half\")"),
        prepare: format!("{call} {PREPARE_ONE}"),
        discover: format!("{call} i32.const 8192"),
        pages: 4,
        ..Guest::default()
    }
}

#[tokio::test]
async fn only_claims_of_call_save_progress() {
    let (stage, notes) = stage(false);
    assert!(prepare(&stage, &saver("u-1", 4), "").await);
    assert_eq!(notes.lines(), ["tiny.example.com u-1 saves half"]);
    let driver = stage.try_load(saver("u-1", 4).module(), "").await.unwrap();
    assert!(!driver.is_pure(), "a crash would leave its work half done");
    driver.discover(&a_call(), Trigger::Load).await.unwrap();
    for guest in [saver("u-2", 4), saver("u-1", 65_537)] {
        assert!(prepare(&stage, &guest, "").await);
    }
    assert_eq!(notes.lines().len(), 1, "nothing else was saved");
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// The audit's lines.
    fn audit(&self) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines()
            .filter(|line| line.contains(" audit: "))
            .map(str::to_owned)
            .collect()
    }
}

#[tokio::test]
async fn audit_logs_each_write_without_flood() {
    // Without a subscriber of all threads, a log line that another thread writes first may be switched off for this thread too.
    let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
    let log = Log::default();
    let sink = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || sink.clone())
        .finish();
    let _listening = tracing::subscriber::set_default(subscriber);
    let (stage, _) = stage(false);
    prepare(&stage, &writer(LED, "5", 2, PREPARE_ONE), GRANT).await;
    let [first, second] = &log.audit()[..] else {
        panic!("{:?}", log.audit())
    };
    for part in [
        "driver=\"tiny.example.com\"",
        "claims=\"u-1\"",
        "request=\"r-1\"",
        "path=\"devices/led/brightness\"",
        "before=\"0\"",
        "after=\"5\"",
        "outcome=\"written\"",
    ] {
        assert!(first.contains(part), "{part}: {first}");
    }
    assert!(second.contains("before=\"5\""), "{second}");

    log.0.lock().unwrap().clear();
    prepare(
        &stage,
        &writer(LED, "\u{1b}[31m\n", 5000, PREPARE_ONE),
        GRANT,
    )
    .await;
    let refused = log.audit();
    assert!((1..1000).contains(&refused.len()), "{}", refused.len());
    assert!(
        refused[0].contains("outcome=\"refused\"") && refused[0].contains("code=\"not-granted\""),
        "{refused:?}"
    );
    assert!(
        !refused[0].contains('\u{1b}') && refused[0].contains("after=\" [31m \""),
        "{}",
        refused[0]
    );
}
