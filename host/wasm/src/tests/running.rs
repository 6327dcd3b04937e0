use super::guest::{PREPARE_ONE, env_edit};
use super::*;
use nodedock_core::driver::ClaimDriver;
use nodedock_model::limit::CALLS_PER_DRIVER;
use nodedock_model::{Edits, PreparedClaim, Problem, ProblemKind};

async fn discovery_fails(guest: Guest, grant: &str) -> (Problem, WasmDriver) {
    let stage = Stage::new();
    let driver = stage.try_load(guest.module(), grant).await.unwrap();
    (driver.discover(&a_call(), Trigger::Load).await.unwrap_err(), driver)
}

#[tokio::test]
async fn an_empty_driver_has_an_empty_inventory_and_a_fresh_instance_each_time() {
    // The counter would trap at the second call of one instance.
    let once = "(if (i32.load8_u (i32.const 300)) (then unreachable))
                (i32.store8 (i32.const 300) (i32.const 1)) i32.const 8192";
    let driver = Stage::new().load(&Guest { discover: once.into(), ..Guest::default() }).await;
    for _ in 0..3 {
        assert_eq!(driver.discover(&a_call(), Trigger::Timer).await.unwrap().device_count(), 0);
    }
    let stats = driver.stats();
    assert_eq!((calls(&driver), stats.ended(Outcome::Trap)), (4, 0), "describe is a call as well");
    assert_eq!(stats.peak_memory.get(), 64 << 10);
}

#[tokio::test]
async fn a_trap_costs_one_call_and_says_where_it_was() {
    let trap = "(if (i32.eqz (local.get 11)) (then unreachable)) i32.const 8192";
    let (problem, driver) = discovery_fails(Guest { discover: trap.into(), ..Guest::default() }, "").await;
    assert_eq!((problem.kind, problem.code.as_str()), (ProblemKind::Internal, "driver-trapped"));
    assert!(problem.message.contains("unreachable"), "{}", problem.message);
    driver.discover(&a_call(), Trigger::Timer).await.unwrap();
    assert_eq!(driver.stats().ended(Outcome::Trap), 1);
}

#[tokio::test]
async fn a_driver_that_spins_is_stopped_and_others_go_on_meanwhile() {
    let spin = Guest { discover: "(loop $l (br $l)) unreachable".into(), ..Guest::default() };
    let stage = Stage::new();
    let spinning = stage.try_load(spin.module(), "limits: {cpuMs: 100}").await.unwrap();
    let other = stage.load(&Guest::default()).await;
    let call = a_call();
    // One thread serves both: it is the spinning guest that gives way.
    let stopped = spinning.discover(&call, Trigger::Load);
    tokio::pin!(stopped);
    assert!(futures::poll!(&mut stopped).is_pending());
    other.discover(&call, Trigger::Load).await.unwrap();
    assert_eq!(stopped.await.unwrap_err().code, "driver-cpu-limit");
    assert_eq!(spinning.stats().refusals(Limit::Cpu).get(), 1);
}

#[tokio::test]
async fn the_deadline_of_the_request_ends_a_call() {
    let spin = Guest { discover: "(loop $l (br $l)) unreachable".into(), ..Guest::default() };
    let driver = Stage::new().load(&spin).await;
    let call = nodedock_core::driver::Call { deadline: Duration::from_millis(30), ..a_call() };
    assert_eq!(driver.discover(&call, Trigger::Load).await.unwrap_err().code, "driver-deadline");
    assert_eq!(driver.stats().ended(Outcome::Deadline), 1);
}

#[tokio::test]
async fn memory_is_summed_and_bounded() {
    let greedy = "(loop $l (drop (memory.grow (i32.const 16))) (br $l)) unreachable";
    let guest = Guest { discover: greedy.into(), ..Guest::default() };
    let (problem, driver) = discovery_fails(guest, "limits: {memoryMiB: 8}").await;
    assert_eq!(problem.code, "driver-memory-limit");
    assert!(problem.message.contains("8 MiB"), "{}", problem.message);
    assert!(driver.stats().peak_memory.get() <= 8 << 20);
}

#[tokio::test]
async fn an_answer_that_is_huge_or_points_nowhere_is_refused() {
    // Half a million pools in a memory that has them, and a hundred beyond the memory.
    for (pages, place, count, code) in
        [(600, 65536, 500_000, "driver-answer-too-large"), (1, 65000, 100, "driver-trapped")]
    {
        let discover = format!(
            "(i32.store (i32.const 8196) (i32.const {place})) (i32.store (i32.const 8200) (i32.const {count})) i32.const 8192"
        );
        let (problem, _) = discovery_fails(Guest { discover, pages, ..Guest::default() }, "").await;
        assert_eq!(problem.code, code, "{problem:?}");
    }
    // Pools at the zeroes: each has an empty name.
    let body = "(i32.store (i32.const 8196) (i32.const 20000)) (i32.store (i32.const 8200) (i32.const 2)) i32.const 8192";
    let (problem, driver) = discovery_fails(Guest { discover: body.into(), ..Guest::default() }, "").await;
    assert_eq!(problem.code, "driver-answer-not-valid");
    assert!(problem.message.contains("pool name \"\""), "{}", problem.message);
    assert_eq!(driver.stats().answers_refused.get(), 1);
    let body = "(i32.store (i32.const 8196) (i32.const 20000)) (i32.store (i32.const 8200) (i32.const 65)) i32.const 8192";
    let (problem, _) = discovery_fails(Guest { discover: body.into(), ..Guest::default() }, "").await;
    assert!(problem.message.contains("65 pools, at most 64"), "{}", problem.message);
}

#[tokio::test]
async fn each_claim_has_an_outcome_whatever_the_driver_says() {
    let driver = Stage::new().load(&Guest { prepare: PREPARE_ONE.into(), ..Guest::default() }).await;
    let outcomes = driver.prepare(&a_call(), &[a_claim("u-1"), a_claim("u-2")]).await;
    assert_eq!(outcomes["u-1"], Ok(PreparedClaim::default()));
    assert_eq!(outcomes["u-2"].as_ref().unwrap_err().code, "claim-skipped");
}

#[tokio::test]
async fn edits_beyond_the_grant_are_refused_and_those_within_come_through() {
    let guest = Guest {
        prepare: PREPARE_ONE.into(),
        extra: env_edit("TINY_X", "1"),
        env: Some("TINY_*"),
        ..Guest::default()
    };
    let stage = Stage::new();
    let denied = stage.load(&guest).await;
    let outcomes = denied.prepare(&a_call(), &[a_claim("u-1")]).await;
    let problem = outcomes["u-1"].as_ref().unwrap_err();
    assert_eq!((problem.kind, problem.code.as_str()), (ProblemKind::Denied, "edit-denied"));
    assert!(problem.message.contains("env TINY_X"), "{}", problem.message);

    let granted = stage.try_load(guest.module(), "env: [\"TINY_*\"]").await.unwrap();
    let outcomes = granted.prepare(&a_call(), &[a_claim("u-1")]).await;
    let edits = Edits { env: vec![("TINY_X".into(), "1".into())], ..Edits::default() };
    assert_eq!(outcomes["u-1"].as_ref().unwrap().edits, edits);
}

#[tokio::test]
async fn a_driver_that_is_busy_says_so_at_the_deadline() {
    let spin = Guest { discover: "(loop $l (br $l)) unreachable".into(), ..Guest::default() };
    let driver = Stage::new().load(&spin).await;
    let long = a_call();
    let mut calls = Vec::new();
    for _ in 0..CALLS_PER_DRIVER {
        let mut call = Box::pin(driver.discover(&long, Trigger::Load));
        assert!(futures::poll!(&mut call).is_pending());
        calls.push(call);
    }
    let call = nodedock_core::driver::Call { deadline: Duration::from_millis(20), ..a_call() };
    let problem = driver.discover(&call, Trigger::Load).await.unwrap_err();
    assert_eq!((problem.kind, problem.code.as_str()), (ProblemKind::Unavailable, "driver-busy"));
}

#[tokio::test]
async fn sysfs_is_read_within_the_grant_and_the_same_within_a_call() {
    // Reads `a` into 8192: result<string, problem>. Its answer is the driver's: an inventory's place is a problem's place.
    let stage = Stage::new();
    let read = "(import \"nodedock:driver/sysfs@0.1.0\" \"read\" (func $read (param i32 i32 i32)))";
    let body = "(call $read (i32.const 300) (i32.const 1) (i32.const 8192))
                (if (i32.load8_u (i32.const 8192)) (then (return (i32.const 8192))))
                (if (i32.ne (i32.load8_u (i32.load (i32.const 8196))) (i32.const 55)) (then unreachable))
                i32.const 12000";
    let guest = Guest {
        imports: read.into(),
        extra: "(data (i32.const 300) \"a\")".into(),
        discover: body.into(),
        sysfs_read: Some("a"),
        ..Guest::default()
    };
    std::fs::write(stage.directory.path().join("sys/a"), "7\n").unwrap();
    let denied = stage.load(&guest).await.discover(&a_call(), Trigger::Load).await.unwrap_err();
    assert_eq!((denied.kind, denied.code.as_str()), (ProblemKind::Denied, "not-granted"));
    let granted = stage.try_load(guest.module(), "sysfsRead: [a]").await.unwrap();
    assert_eq!(granted.discover(&a_call(), Trigger::Load).await.unwrap().device_count(), 0);
    std::fs::remove_file(stage.directory.path().join("sys/a")).unwrap();
    assert_eq!(granted.discover(&a_call(), Trigger::Load).await.unwrap_err().code, "no-such-path");
}
