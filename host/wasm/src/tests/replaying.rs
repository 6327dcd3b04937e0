//! Recorded calls, replayed without their node.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::guest::{NAME, PREPARE_ONE, WRITE_IMPORT, env_edit, write_data};
use super::*;
use crate::replay::{Difference, ReplayError, Replayed, replay};
use nodedock_core::driver::ClaimDriver;
use nodedock_core::recording::file::{self, FORMAT, Header};
use nodedock_core::recording::redact::redact;
use nodedock_core::recording::{self as core, CallOutcome, Line};

const GRANT: &str =
    "sysfsRead: [\"*\"]\nsysfsWrite: [{glob: \"w\", pattern: \"[0-9]+\"}]\nenv: [\"TINY_*\"]";

/// Its claim's UID is its program: each letter calls a function of the host, or traps. The last text that it read, or the code of the last
/// problem, is the value of its variable.
fn interpreter(value: &'static str, variable: &'static str) -> Guest {
    let import = |interface: &str, function: &str, name: &str, parameters: usize| {
        let parameters = " i32".repeat(parameters);
        format!(
            "(import \"nodedock:driver/{interface}@0.2.0\" \"{function}\" (func ${name} (param{parameters})))"
        )
    };
    let imports = [
        WRITE_IMPORT.to_owned(),
        import("sysfs", "read", "read", 3),
        import("sysfs", "glob", "glob", 3),
        import("log", "write", "log", 5),
        import("progress", "save", "save", 5),
        import("prepared-claims", "get", "get", 3),
    ];
    let uid = "(i32.load offset=16 (local.get 11)) (i32.load offset=20 (local.get 11))";
    let keep = "(if (i32.load8_u (i32.const 13312))
            (then (i64.store (i32.const 12312) (i64.load (i32.const 13320))))
            (else (i64.store (i32.const 12312) (i64.load (i32.const 13316)))))";
    let value_bytes = value.len();
    let steps = [
        (
            'r',
            format!("(call $read (i32.const 13000) (i32.const 1) (i32.const 13312)) {keep}"),
        ),
        (
            'n',
            format!("(call $read (i32.const 13001) (i32.const 1) (i32.const 13312)) {keep}"),
        ),
        (
            'g',
            "(call $glob (i32.const 13002) (i32.const 1) (i32.const 13312))".to_owned(),
        ),
        (
            'w',
            format!(
                "(call $write (i32.const 12800) (i32.const 1) (i32.const 12928) (i32.const {value_bytes}) (i32.const 13056))"
            ),
        ),
        (
            's',
            format!("(call $save {uid} (i32.const 13000) (i32.const 3) (i32.const 13312)) {keep}"),
        ),
        ('p', format!("(call $get {uid} (i32.const 13312))")),
        (
            'l',
            "(call $log (i32.const 1) (i32.const 2048) (i32.const 4) (i32.const 0) (i32.const 0))"
                .to_owned(),
        ),
        ('u', "unreachable".to_owned()),
    ];
    let step = |(letter, body): &(char, String)| {
        format!(
            "(if (i32.eq (local.get $c) (i32.const {})) (then {body}))",
            u32::from(*letter)
        )
    };
    let steps: String = steps.iter().map(step).collect();
    let run = format!(
        "(local $i i32) (local $c i32)
         (block $end (loop $next
            (br_if $end (i32.ge_u (local.get $i) (i32.load offset=20 (local.get 11))))
            (local.set $c (i32.load8_u (i32.add (i32.load offset=16 (local.get 11)) (local.get $i))))
            {steps}
            (local.set $i (i32.add (local.get $i) (i32.const 1)))
            (br $next)))"
    );
    let read = "(call $read (i32.const 13000) (i32.const 1) (i32.const 13312))
        (call $glob (i32.const 13002) (i32.const 1) (i32.const 13312)) i32.const 8192";
    Guest {
        imports: imports.concat(),
        extra: format!(
            "{} {} (data (i32.const 13000) \"ab*\")",
            env_edit(variable, "0"),
            write_data("w", value)
        ),
        discover: read.to_owned(),
        prepare: format!("{run} {PREPARE_ONE}"),
        unprepare: format!("{run} i32.const 8192"),
        env: Some("TINY_*"),
        sysfs_read: Some("*"),
        sysfs_write: Some(("w", "[0-9]+")),
        ..Guest::default()
    }
}

/// A node whose driver is recorded.
struct Session {
    stage: Stage,
    driver: WasmDriver,
    recordings: Recordings,
    _directory: tempfile::TempDir,
}

impl Session {
    async fn new(guest: &Guest) -> Self {
        let stage = Stage::on(tempfile::tempdir().unwrap(), true);
        std::fs::write(stage.directory.path().join("sys/a"), "7\n").unwrap();
        std::fs::write(stage.directory.path().join("sys/w"), "0\n").unwrap();
        let driver = stage.try_load(guest.module(), GRANT).await.unwrap();
        let mut session = Self {
            stage,
            driver,
            recordings: Recordings::default(),
            _directory: tempfile::tempdir().unwrap(),
        };
        session.begin();
        session
    }

    /// Begins another recording.
    fn begin(&mut self) {
        self._directory = tempfile::tempdir().unwrap();
        let directory = self._directory.path();
        self.recordings = Recordings::start(directory, [NAME.to_owned()], 1 << 20).unwrap();
        self.driver.recorder = self.recordings.recorder(NAME);
    }

    async fn prepare(&self, program: &str) {
        self.driver.prepare(&a_call(), &[a_claim(program)]).await;
    }

    async fn unprepare(&self, program: &str) {
        let record = nodedock_model::DriverClaimRecord {
            claim: a_claim(program),
            prepared: true,
            memo: vec![1, 2, 3],
            driver_version: "1.2.3".into(),
            boot_id: "boot-1".into(),
        };
        self.driver.unprepare(&a_call(), &[record]).await;
    }

    async fn recorded(&self, code: &[u8]) -> Recording {
        let mut lines = Vec::new();
        for segment in self.recordings.read(NAME).await.unwrap().segments {
            lines.extend_from_slice(&segment.read().unwrap());
        }
        let digest = DriverFile {
            name: String::new(),
            bytes: code.to_vec().into(),
        }
        .digest();
        let file = Line::<core::Raw>::File(core::DriverFile {
            digest,
            base64: STANDARD.encode(code),
        });
        lines.extend_from_slice(&serde_json::to_vec(&file).unwrap());
        let lines = lines
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty());
        Recording {
            lines: lines
                .map(|line| serde_json::from_slice(line).unwrap())
                .collect(),
        }
    }
}

/// The lines of a recording between the first and the last one.
#[derive(Debug, Clone)]
struct Recording {
    lines: Vec<Line>,
}

impl Recording {
    fn texts(&self) -> Vec<Vec<u8>> {
        self.lines
            .iter()
            .map(|line| serde_json::to_vec(line).unwrap())
            .collect()
    }

    /// Returns the bytes of the recording's file.
    fn packed(&self) -> Vec<u8> {
        let header = Header {
            format: FORMAT.to_owned(),
            driver: NAME.to_owned(),
            nodedock: "0.1.0".to_owned(),
            is_redacted: false,
        };
        let mut bytes = Vec::new();
        file::write(&header, self.texts().iter().map(Vec::as_slice), &mut bytes).unwrap();
        bytes
    }

    fn redacted(&self) -> Self {
        let texts = self.texts();
        let redacted = redact(&texts.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
        Self {
            lines: redacted
                .iter()
                .map(|line| serde_json::from_slice(line).unwrap())
                .collect(),
        }
    }
}

fn calls(recording: &Recording) -> usize {
    recording
        .lines
        .iter()
        .filter(|line| matches!(line, Line::Call(_)))
        .count()
}

#[derive(Debug, Clone)]
enum Step {
    Prepare(String),
    Unprepare(String),
    Discover,
    /// The node changes.
    Write(String),
}

fn step() -> impl Strategy<Value = Step> {
    // Every program ends with a number, as UIDs of two claims differ; one in twenty traps.
    let program = || ("[rnwsgpl]{0,6}", prop::bool::weighted(0.05), 0..10u8);
    let text = |(letters, traps, number): (String, bool, u8)| {
        format!("{letters}{}0{number}", if traps { "u" } else { "" })
    };
    prop_oneof![
        4 => program().prop_map(text).prop_map(Step::Prepare),
        2 => program().prop_map(text).prop_map(Step::Unprepare),
        1 => Just(Step::Discover),
        2 => "[a-z0-9 ]{0,20}".prop_map(Step::Write),
    ]
}

#[test]
fn generated_sessions_replay_to_equal_answers() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let guest = interpreter("5", "TINY_X");
    let code = guest.module();
    let session = runtime.block_on(Session::new(&guest));
    let session = std::cell::RefCell::new(session);
    // A replay has no node: its `/sys` is empty.
    let elsewhere = runtime.block_on(async { Stage::on(tempfile::tempdir().unwrap(), true) });
    let replayed_calls = std::cell::Cell::new(0);
    let mut runner = TestRunner::new(Config {
        cases: 1000,
        failure_persistence: None,
        ..Config::default()
    });
    let steps = prop::collection::vec(step(), 1..8);
    runner
        .run(&steps, |steps| {
            let mut session = session.borrow_mut();
            session.begin();
            session.driver.containment().resume();
            let (replayed, recording) = runtime.block_on(async {
                for step in &steps {
                    match step {
                        Step::Prepare(program) => session.prepare(program).await,
                        Step::Unprepare(program) => session.unprepare(program).await,
                        Step::Discover => {
                            drop(session.driver.discover(&a_call(), Trigger::Timer).await)
                        }
                        Step::Write(text) => {
                            std::fs::write(session.stage.directory.path().join("sys/a"), text)
                                .unwrap();
                        }
                    }
                }
                let recording = session.recorded(&code).await;
                (
                    replay(&elsewhere.host, &recording.packed(), None)
                        .await
                        .unwrap(),
                    recording,
                )
            });
            let expected = steps
                .iter()
                .filter(|step| !matches!(step, Step::Write(_)))
                .count();
            prop_assert!(calls(&recording) <= expected);
            replayed_calls.set(replayed_calls.get() + calls(&recording));
            let equal = Replayed {
                calls: calls(&recording),
                skipped: 0,
                redacted: 0,
                lost: 0,
                difference: None,
            };
            prop_assert_eq!(replayed, equal);
            Ok(())
        })
        .unwrap();
    assert!(
        replayed_calls.get() > 1000,
        "of 1,000 sessions {} calls are recorded",
        replayed_calls.get()
    );
}

async fn difference(guest: &Guest) -> Option<Difference> {
    let (session, original) = (
        Session::new(&interpreter("5", "TINY_X")).await,
        interpreter("5", "TINY_X"),
    );
    session.prepare("r1").await;
    session.prepare("rwg2").await;
    let recording = session.recorded(&original.module()).await;
    let other = Some(guest.module().into());
    let replayed = replay(&session.stage.host, &recording.packed(), other)
        .await
        .unwrap();
    replayed.difference
}

#[tokio::test]
async fn changed_driver_differs_at_first_change() {
    assert_eq!(difference(&interpreter("5", "TINY_X")).await, None);
    let other_write = difference(&interpreter("6", "TINY_X")).await.unwrap();
    assert_eq!(
        (
            other_write.call,
            other_write.host_call,
            other_write.operation.as_str()
        ),
        (2, Some(2), "prepare")
    );
    assert_eq!(other_write.expected, "sysfs-write.write [\"w\",\"5\"]");
    assert_eq!(other_write.got, "sysfs-write.write [\"w\",\"6\"]");
    let text = other_write.to_string();
    assert!(
        text.starts_with("call 2 (prepare, request r-1), host call 2:\n  expected sysfs-write"),
        "{text}"
    );

    let other_answer = difference(&interpreter("5", "TINY_Y")).await.unwrap();
    let place = "/0/outcome/Ok/edits/env/0/key".to_owned();
    assert_eq!(
        (
            other_answer.call,
            other_answer.host_call,
            other_answer.place
        ),
        (1, None, place)
    );
    assert_eq!(other_answer.expected, "\"TINY_X\"");

    let fewer = Guest {
        prepare: PREPARE_ONE.into(),
        ..interpreter("5", "TINY_X")
    };
    let fewer = difference(&fewer).await.unwrap();
    assert_eq!(
        (fewer.call, fewer.host_call, fewer.expected.as_str()),
        (1, Some(1), "sysfs.read [\"a\"]")
    );
    assert!(fewer.got.starts_with("the answer"), "{fewer}");

    let traps = Guest {
        prepare: "unreachable".into(),
        ..interpreter("5", "TINY_X")
    };
    let traps = difference(&traps).await.unwrap();
    assert!(
        traps.got.starts_with("a failure, driver-trapped"),
        "{traps}"
    );

    let more = Guest {
        prepare: format!(
            "(call $glob (i32.const 13002) (i32.const 1) (i32.const 13312)) {}",
            PREPARE_ONE
        ),
        ..interpreter("5", "TINY_X")
    };
    let more = difference(&more).await.unwrap();
    assert_eq!(
        (more.host_call, more.got.as_str()),
        (Some(1), "sysfs.glob [\"*\"]")
    );
}

#[tokio::test]
async fn timed_out_calls_are_not_replayed() {
    let spin = Guest {
        discover: "(loop $l (br $l)) i32.const 8192".into(),
        ..interpreter("5", "TINY_X")
    };
    let mut session = Session::new(&spin).await;
    let limits = "limits: {cpuMs: 20, memoryMiB: 1}";
    session.driver = session.stage.try_load(spin.module(), limits).await.unwrap();
    session.begin();
    session
        .driver
        .discover(&a_call(), Trigger::Load)
        .await
        .unwrap_err();
    session.prepare("u1").await;
    session.prepare("r1").await;
    let recording = session.recorded(&spin.module()).await;
    let replayed = replay(&session.stage.host, &recording.packed(), None)
        .await
        .unwrap();
    assert_eq!(
        replayed,
        Replayed {
            calls: 2,
            skipped: 1,
            redacted: 0,
            lost: 0,
            difference: None
        }
    );
}

#[tokio::test]
async fn unreplayable_recording_is_refused_with_reason() {
    let guest = interpreter("5", "TINY_X");
    let session = Session::new(&guest).await;
    session.prepare("r1").await;
    let whole = session.recorded(&guest.module()).await;
    let refused = async |change: &dyn Fn(&mut Recording), other: Option<Vec<u8>>| {
        let mut changed = whole.clone();
        change(&mut changed);
        let error = replay(
            &session.stage.host,
            &changed.packed(),
            other.map(Into::into),
        )
        .await
        .unwrap_err();
        nodedock_base::error::chain(&error)
    };
    let with_revision = |change: fn(&mut core::Revision)| {
        move |recording: &mut Recording| {
            for line in &mut recording.lines {
                if let Line::Revision(revision) = line {
                    change(revision);
                }
            }
        }
    };
    let without = |unwanted: fn(&Line) -> bool| {
        move |recording: &mut Recording| recording.lines.retain(|line| !unwanted(line))
    };
    let other_contract =
        with_revision(|revision| revision.contract = "nodedock:driver@0.3.0".into());
    assert_eq!(
        refused(&other_contract, None).await,
        "it is of a driver for nodedock:driver@0.3.0, and this version replays nodedock:driver@0.2.x"
    );
    let native = with_revision(|revision| revision.kind = core::Kind::Native);
    let refusal = refused(&native, None).await;
    assert!(
        refusal.contains("the native plugin tiny.example.com, which cannot be replayed"),
        "{refusal}"
    );
    let no_file = without(|line| matches!(line, Line::File(_)));
    let refusal = refused(&no_file, None).await;
    assert!(
        refusal.contains("does not contain the driver's file sha256:"),
        "{refusal}"
    );
    let no_revision = without(|line| matches!(line, Line::Revision(_)));
    assert_eq!(
        refused(&no_revision, None).await,
        "call 1 has no revision before it"
    );
    let no_module = refused(&|_| (), Some(b"x".to_vec())).await;
    assert!(
        no_module.starts_with("load the driver's file: "),
        "{no_module}"
    );
    let damaged = refused(
        &|recording| {
            for line in &mut recording.lines {
                if let Line::File(file) = line {
                    file.base64.clear();
                }
            }
        },
        None,
    );
    assert!(damaged.await.contains("is damaged"));
    let not_arguments = |recording: &mut Recording| {
        for line in &mut recording.lines {
            if let Line::Call(call) = line {
                call.arguments = serde_json::json!({"prepare": 1});
            }
        }
    };
    let refusal = refused(&not_arguments, None).await;
    assert!(
        refusal.starts_with("call 1: its arguments are not those of a prepare"),
        "{refusal}"
    );
    let renamed = with_revision(|revision| revision.driver = "other.example.com".into());
    assert!(matches!(
        replay(
            &session.stage.host,
            &{
                let mut changed = whole.clone();
                renamed(&mut changed);
                changed.packed()
            },
            None
        )
        .await,
        Err(ReplayError::OtherDriver { .. })
    ));
}

#[tokio::test]
async fn a_redacted_recording_replays_the_rest() {
    const SECRET: &str = "hunter2-licence-KEY";
    let guest = interpreter("5", "TINY_X");
    let session = Session::new(&guest).await;
    drop(session.driver.discover(&a_call(), Trigger::Timer).await);
    let mut claim = a_claim("rs2");
    claim.configs = vec![nodedock_model::OpaqueConfig {
        driver: nodedock_model::DriverName::new(NAME).unwrap(),
        source: nodedock_model::ConfigSource::Claim,
        requests: Vec::new(),
        parameters: serde_json::json!({"token": SECRET}).to_string(),
    }];
    session.driver.prepare(&a_call(), &[claim]).await;
    let recording = session.recorded(&guest.module()).await;
    let text = |recording: &Recording| serde_json::to_string(&recording.lines).unwrap();
    assert!(text(&recording).contains(SECRET));
    let recording = recording.redacted();
    assert!(!text(&recording).contains(SECRET));
    let replayed = replay(&session.stage.host, &recording.packed(), None)
        .await
        .unwrap();
    assert_eq!(
        replayed,
        Replayed {
            calls: 1,
            skipped: 0,
            redacted: 1,
            lost: 0,
            difference: None
        }
    );
}

#[tokio::test]
async fn unrecorded_driver_has_no_tap() {
    let guest = interpreter("5", "TINY_X");
    let session = Session::new(&guest).await;
    let plain = session.stage.try_load(guest.module(), GRANT).await.unwrap();
    plain.prepare(&a_call(), &[a_claim("r1")]).await["r1"]
        .as_ref()
        .unwrap();
    assert_eq!(calls(&session.recorded(&guest.module()).await), 0);
    session.prepare("r1").await;
    let recording = session.recorded(&guest.module()).await;
    let Some(Line::Call(call)) = recording
        .lines
        .iter()
        .find(|line| matches!(line, Line::Call(_)))
    else {
        panic!("{recording:?}")
    };
    assert_eq!(
        (
            call.operation.as_ref(),
            call.request.as_str(),
            call.host.len()
        ),
        ("prepare", "r-1", 1)
    );
    assert_eq!(call.host[0].function, "sysfs.read");
    assert_eq!(
        call.host[0].answer,
        CallOutcome::Returned(serde_json::json!({"Ok": "7"}))
    );
}
