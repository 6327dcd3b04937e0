//! Every limit of the sandbox: reached, named with its value, and counted.

use super::guest::PREPARE_ONE;
use super::hostile::table::{WASI, WASI_IMPORTS};
use super::*;
use crate::host_functions::writes::WRITES_PER_CALL;
use crate::limits::concurrency::{CALLS_MAX, SLOW_CALLS_MAX, SLOW_CALLS_PER_DRIVER};
use crate::limits::limiter::{CALL_TABLE_ELEMENTS, CALL_TABLES, HANDLES_MAX};
use nodedock_core::driver::ClaimDriver;
use nodedock_core::driver::quarantine::FAILURES_MAX;
use nodedock_model::{Problem, ProblemKind};

const SPIN: &str = "(loop $l (br $l)) unreachable";
const LOG: &str =
    "(import \"nodedock:driver/log@0.2.0\" \"write\" (func $log (param i32 i32 i32 i32 i32)))";
const READ: &str =
    "(import \"nodedock:driver/sysfs@0.2.0\" \"read\" (func $read (param i32 i32 i32)))";

async fn loaded(stage: &Stage, guest: &Guest, grant: &str) -> WasmDriver {
    stage.try_load(guest.module(), grant).await.unwrap()
}

/// A discovery that ends at a limit, by what is granted.
async fn refused(guest: Guest, grant: &str) -> (Problem, Arc<Stats>) {
    let driver = loaded(&Stage::new(), &guest, grant).await;
    let problem = driver.discover(&a_call(), Trigger::Load).await.unwrap_err();
    (problem, driver.stats())
}

fn discovering(discover: impl Into<String>) -> Guest {
    Guest {
        discover: discover.into(),
        ..Guest::default()
    }
}

/// The problem names the limit and its value, and it is the only limit that was counted, once.
fn assert_limit((problem, stats): (Problem, Arc<Stats>), code: &str, value: &str, limit: Limit) {
    assert_eq!(problem.code, code, "{problem}");
    assert!(problem.message.contains(value), "{value}: {problem}");
    let counts = Limit::ALL
        .iter()
        .map(|limit| (*limit, stats.refusals(*limit).get()));
    let counted: Vec<_> = counts.filter(|(_, count)| *count > 0).collect();
    assert_eq!(counted, [(limit, 1)], "{problem}");
}

/// Reads `a` so many times, or until the host refuses; the refusal is the driver's answer, an empty inventory otherwise.
fn reading(times: u32) -> Guest {
    let discover = format!(
        "(local $n i32)
         (loop $l
           (call $read (i32.const 300) (i32.const 1) (i32.const 8192))
           (if (i32.load8_u (i32.const 8192)) (then (return (i32.const 8192))))
           (local.set $n (i32.add (local.get $n) (i32.const 1)))
           (br_if $l (i32.lt_u (local.get $n) (i32.const {times}))))
         i32.const 12000"
    );
    Guest {
        imports: READ.into(),
        extra: "(data (i32.const 300) \"a\")".into(),
        sysfs_read: Some("a"),
        pages: 64,
        ..discovering(discover)
    }
}

/// Writes so many lines of so many bytes into the log, and has an empty inventory.
fn logging(lines: u32, bytes: u32) -> Guest {
    let discover = format!(
        "(local $n i32)
         (loop $l
           (call $log (i32.const 2) (i32.const 20000) (i32.const {bytes}) (i32.const 0) (i32.const 0))
           (local.set $n (i32.add (local.get $n) (i32.const 1)))
           (br_if $l (i32.lt_u (local.get $n) (i32.const {lines}))))
         i32.const 8192"
    );
    Guest {
        imports: LOG.into(),
        ..discovering(discover)
    }
}

#[tokio::test]
async fn grant_limits_wall_clock_and_cpu() {
    let wall = refused(discovering(SPIN), "limits: {wallMs: 600, cpuMs: 20000}").await;
    assert_eq!(wall.1.ended(Outcome::Deadline), 1);
    let (total, peak) = (wall.1.cpu_seconds.get(), wall.1.peak_cpu_seconds.get());
    assert!(peak > 0.0 && total >= peak, "{total} {peak}");
    assert_limit(wall, "driver-deadline", "300ms", Limit::Wall);
    let cpu = refused(discovering(SPIN), "limits: {cpuMs: 50}").await;
    assert_eq!(cpu.1.ended(Outcome::Limit), 1);
    assert_limit(cpu, "driver-cpu-limit", "50 ms", Limit::Cpu);
}

#[tokio::test]
async fn memory_limits_are_named_with_peaks() {
    let grow =
        "(drop (memory.grow (i32.const 32))) (drop (memory.grow (i32.const 1000))) unreachable";
    let memory = refused(discovering(grow), "limits: {memoryMiB: 8}").await;
    assert_eq!(memory.1.peak_memory.get(), 33 << 16);
    assert_limit(memory, "driver-memory-limit", "8 MiB", Limit::Memory);

    let grow = "(drop (table.grow $t (ref.null func) (i32.const 60000)))
                (drop (table.grow $u (ref.null func) (i32.const 60000))) unreachable";
    let tables = "(table $t 1 funcref) (table $u 1 funcref)".into();
    let entries = refused(
        Guest {
            extra: tables,
            ..discovering(grow)
        },
        "",
    )
    .await;
    assert_eq!(entries.1.peak_table_elements.get(), 60_002);
    let value = CALL_TABLE_ELEMENTS.to_string();
    assert_limit(
        entries,
        "driver-table-elements-limit",
        &value,
        Limit::TableElements,
    );
}

#[tokio::test]
async fn too_many_tables_fail_the_load() {
    let tables = "(table 0 funcref)".repeat(CALL_TABLES + 1);
    let text = Stage::new()
        .refusal(
            Guest {
                extra: tables,
                ..Guest::default()
            }
            .module(),
        )
        .await
        .to_string();
    assert!(
        text.contains("tables") && text.contains(&CALL_TABLES.to_string()),
        "{text}"
    );
}

#[tokio::test]
async fn response_is_bounded_by_the_grant() {
    let pools = "(i32.store (i32.const 8196) (i32.const 65536)) (i32.store (i32.const 8200) (i32.const 20000)) i32.const 8192";
    let guest = || Guest {
        pages: 64,
        ..discovering(pools)
    };
    let bytes = refused(guest(), "limits: {answerMiB: 1}").await;
    assert_limit(
        bytes,
        "driver-answer-too-large",
        "1048576 bytes",
        Limit::HostcallData,
    );
    let entries = refused(guest(), "").await;
    assert_eq!(entries.1.answers_refused.get(), 1);
    assert_limit(
        entries,
        "driver-answer-not-valid",
        "at most 64",
        Limit::AnswerEntries,
    );
}

#[tokio::test]
async fn overlong_problem_is_truncated_and_counted() {
    let body =
        "(i32.store8 (i32.const 8192) (i32.const 1)) (i32.store (i32.const 8208) (i32.const 20000))
                (i32.store (i32.const 8212) (i32.const 2000)) i32.const 8192";
    let (problem, stats) = refused(discovering(body), "").await;
    assert_eq!(
        (problem.code.as_str(), problem.message.len()),
        ("no-code", 1024)
    );
    assert_eq!(
        (
            stats.refusals(Limit::ProblemBytes).get(),
            stats.ended(Outcome::Answered)
        ),
        (1, 2)
    );
}

#[tokio::test]
async fn handles_are_bounded() {
    let discover = "(loop $l (drop (call $timer (i64.const 1))) (br $l)) unreachable";
    let guest = Guest {
        wit: Some(WASI),
        imports: WASI_IMPORTS.into(),
        ..discovering(discover)
    };
    let value = format!("{HANDLES_MAX} handles");
    assert_limit(
        refused(guest, "").await,
        "driver-handles-limit",
        &value,
        Limit::Handles,
    );
}

#[tokio::test]
async fn grant_bounds_the_host_calls() {
    let stage = Stage::new();
    std::fs::write(stage.directory.path().join("sys/a"), "7\n").unwrap();
    let driver = loaded(
        &stage,
        &reading(5),
        "sysfsRead: [a]\nlimits: {hostOperations: 3}",
    )
    .await;
    let problem = driver.discover(&a_call(), Trigger::Load).await.unwrap_err();
    assert_eq!(driver.stats().host_operations.get(), 3);
    assert_eq!(
        driver.stats().ended(Outcome::Answered),
        2,
        "the driver continued with the refusal"
    );
    assert_limit(
        (problem, driver.stats()),
        "host-call-limit",
        "3 times",
        Limit::HostOperations,
    );

    let enough = loaded(
        &stage,
        &reading(5),
        "sysfsRead: [a]\nlimits: {hostOperations: 5}",
    )
    .await;
    enough.discover(&a_call(), Trigger::Load).await.unwrap();
    assert_eq!(enough.stats().peak_host_operations.get(), 5);
    assert!(
        enough.stats().host_bytes.get() >= 10,
        "{:?}",
        enough.stats()
    );
}

#[tokio::test]
async fn infallible_host_call_reports_its_limit() {
    let ended = refused(logging(3, 4), "limits: {hostOperations: 2}").await;
    assert_eq!(
        (ended.1.ended(Outcome::Limit), ended.1.ended(Outcome::Trap)),
        (1, 0)
    );
    assert_limit(ended, "host-call-limit", "2 times", Limit::HostOperations);
}

#[tokio::test]
async fn grant_bounds_bytes_from_the_host() {
    let stage = Stage::new();
    std::fs::write(stage.directory.path().join("sys/a"), [b'x'; 60_000]).unwrap();
    let driver = loaded(&stage, &reading(30), "sysfsRead: [a]\nlimits: {hostMiB: 1}").await;
    let problem = driver.discover(&a_call(), Trigger::Load).await.unwrap_err();
    assert_limit(
        (problem, driver.stats()),
        "host-call-limit",
        "1048576 bytes",
        Limit::HostBytes,
    );
    loaded(&stage, &reading(30), "sysfsRead: [a]")
        .await
        .discover(&a_call(), Trigger::Load)
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn hanging_node_read_is_abandoned() {
    let stage = Stage::new();
    let driver = loaded(&stage, &reading(1), "sysfsRead: [a]").await;
    let scope = &driver.sandbox.scope;
    // Threads that hang keep their permits.
    let _hanging = scope
        .blocking
        .acquire_many(SYSFS_THREADS_PER_DRIVER as u32)
        .await
        .unwrap();
    let problem = driver.discover(&a_call(), Trigger::Load).await.unwrap_err();
    assert_limit(
        (problem, driver.stats()),
        "sysfs-stuck",
        "2000 ms",
        Limit::HostLook,
    );
    assert!(
        driver.containment().is_slow(Operation::Discover),
        "others wait for its permits"
    );
}

#[tokio::test]
async fn grant_bounds_the_log_rate() {
    let stage = Stage::new();
    for (guest, grant, limit) in [
        (
            logging(10, 4),
            "limits: {logLinesPerSecond: 1}",
            Limit::LogLines,
        ),
        (
            logging(10, 3000),
            "limits: {logBytesPerSecond: 1}",
            Limit::LogBytes,
        ),
    ] {
        let driver = loaded(&stage, &guest, grant).await;
        driver.discover(&a_call(), Trigger::Load).await.unwrap();
        let stats = driver.stats();
        assert!(stats.refusals(limit).get() > 0, "{grant}");
        assert_eq!(
            (
                stats.log_lines_dropped() + stats.log_lines.get(),
                calls(&driver)
            ),
            (10, 2),
            "{grant}"
        );
    }
    let free = loaded(&stage, &logging(10, 4), "").await;
    free.discover(&a_call(), Trigger::Load).await.unwrap();
    assert_eq!(
        (
            free.stats().log_lines.get(),
            free.stats().log_lines_dropped()
        ),
        (10, 0)
    );
}

#[tokio::test]
async fn grant_and_node_bound_concurrent_calls() {
    let stage = Stage::new();
    let driver = loaded(&stage, &discovering(SPIN), "limits: {concurrentCalls: 1}").await;
    let long = a_call();
    let mut spinning = Box::pin(driver.discover(&long, Trigger::Load));
    assert!(futures::poll!(&mut spinning).is_pending());
    let call = nodedock_core::driver::Call {
        deadline: Duration::from_millis(20),
        ..a_call()
    };
    let problem = driver.discover(&call, Trigger::Load).await.unwrap_err();
    drop(spinning);
    assert_eq!(problem.kind, ProblemKind::Unavailable);
    assert_limit(
        (problem, driver.stats()),
        "driver-busy",
        "the driver was busy with 1 other",
        Limit::DriverCalls,
    );

    let idle = stage.load(&Guest::default()).await;
    let _others = stage
        .host
        .permits
        .all
        .memories
        .acquire_many(CALLS_MAX as u32)
        .await
        .unwrap();
    let problem = idle.discover(&call, Trigger::Load).await.unwrap_err();
    assert_eq!(idle.stats().ended(Outcome::Busy), 1);
    assert_limit(
        (problem, idle.stats()),
        "driver-busy",
        "the node was busy with 64 other",
        Limit::NodeCalls,
    );
}

#[test]
fn the_documentation_has_these_limits() {
    let page = include_str!("../../../../docs/security.md");
    assert!(page.contains(&format!(
        "| {SLOW_CALLS_PER_DRIVER}, {SLOW_CALLS_MAX} (1 GiB),"
    )));
    assert!(page.contains(&format!("| {FAILURES_MAX}; 5 s doubled up to 5 min")));
    assert!(page.contains(&format!("| values written below `/sys`, functions bound, and saves of progress in a call | {WRITES_PER_CALL} |")));
}

#[tokio::test]
async fn calls_are_counted_with_their_time() {
    let driver = Stage::new()
        .load(&Guest {
            prepare: PREPARE_ONE.into(),
            ..Guest::default()
        })
        .await;
    driver.discover(&a_call(), Trigger::Load).await.unwrap();
    driver.prepare(&a_call(), &[a_claim("u-1")]).await;
    let stats = driver.stats();
    let answered = |operation: &Operation| stats.calls(*operation, Outcome::Answered).get();
    let counted = Operation::ALL.iter().map(answered).collect::<Vec<_>>();
    assert_eq!(counted, [1, 1, 0, 0, 0, 1, 0]);
    let seconds = stats.seconds(Operation::Prepare);
    assert!(seconds.count() == 1 && seconds.sum() > 0.0, "{seconds:?}");
    assert!(stats.cpu_seconds.get() > 0.0);
}
