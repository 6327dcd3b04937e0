use super::guest::{PREPARE_ONE, env_edit};
use super::*;
use nodedock_core::driver::ClaimDriver;
use nodedock_model::{Edits, ProblemKind};

#[tokio::test]
async fn each_call_has_a_fresh_instance() {
    // The counter would trap at the second call of one instance.
    let once = "(if (i32.load8_u (i32.const 300)) (then unreachable))
                (i32.store8 (i32.const 300) (i32.const 1)) i32.const 8192";
    let driver = Stage::new()
        .load(&Guest {
            discover: once.into(),
            ..Guest::default()
        })
        .await;
    for _ in 0..3 {
        assert_eq!(
            driver
                .discover(&a_call(), Trigger::Timer)
                .await
                .unwrap()
                .device_count(),
            0
        );
    }
    let stats = driver.stats();
    assert_eq!(
        (calls(&driver), stats.ended(Outcome::Trap)),
        (4, 0),
        "describe is a call as well"
    );
    assert_eq!(stats.peak_memory.get(), 64 << 10);
}

#[tokio::test]
async fn trap_costs_only_one_call() {
    let trap = "(if (i32.eqz (local.get 11)) (then unreachable)) i32.const 8192";
    let driver = Stage::new()
        .load(&Guest {
            discover: trap.into(),
            ..Guest::default()
        })
        .await;
    let problem = driver.discover(&a_call(), Trigger::Load).await.unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Internal, "driver-trapped")
    );
    assert!(
        problem.message.contains("unreachable"),
        "{}",
        problem.message
    );
    driver.discover(&a_call(), Trigger::Timer).await.unwrap();
    assert_eq!(driver.stats().ended(Outcome::Trap), 1);
}

#[tokio::test]
async fn edits_beyond_the_grant_are_refused() {
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
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Denied, "edit-denied")
    );
    assert!(
        problem.message.contains("env TINY_X"),
        "{}",
        problem.message
    );

    let granted = stage
        .try_load(guest.module(), "env: [\"TINY_*\"]")
        .await
        .unwrap();
    let outcomes = granted.prepare(&a_call(), &[a_claim("u-1")]).await;
    let edits = Edits {
        env: vec![("TINY_X".into(), "1".into())],
        ..Edits::default()
    };
    assert_eq!(outcomes["u-1"].as_ref().unwrap().edits, edits);
}

#[tokio::test]
async fn sysfs_reads_are_granted_and_stable() {
    // Reads `a` into 8192: result<string, problem>. Its answer is the driver's: an inventory's place is a problem's place.
    let stage = Stage::new();
    let read = "(import \"nodedock:driver/sysfs@0.2.0\" \"read\" (func $read (param i32 i32 i32)))";
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
    let denied = stage
        .load(&guest)
        .await
        .discover(&a_call(), Trigger::Load)
        .await
        .unwrap_err();
    assert_eq!(
        (denied.kind, denied.code.as_str()),
        (ProblemKind::Denied, "not-granted")
    );
    let granted = stage
        .try_load(guest.module(), "sysfsRead: [a]")
        .await
        .unwrap();
    assert_eq!(
        granted
            .discover(&a_call(), Trigger::Load)
            .await
            .unwrap()
            .device_count(),
        0
    );
    std::fs::remove_file(stage.directory.path().join("sys/a")).unwrap();
    assert_eq!(
        granted
            .discover(&a_call(), Trigger::Load)
            .await
            .unwrap_err()
            .code,
        "no-such-path"
    );
}

/// Waits for `/sys/a` this long in a discovery, and traps if it does not come.
fn waiting(milliseconds: u32) -> Guest {
    let discover = format!(
        "(call $wait (i32.const 300) (i32.const 1) (i32.const {milliseconds}) (i32.const 8192))
         (if (i32.load8_u (i32.const 8192)) (then (return (i32.const 8192))))
         (if (i32.eqz (i32.load (i32.const 8200))) (then unreachable))
         i32.const 12000"
    );
    Guest {
        imports: "(import \"nodedock:driver/sysfs@0.2.0\" \"wait-for\" (func $wait (param i32 i32 i32 i32)))".into(),
        extra: "(data (i32.const 300) \"a\")".into(),
        discover,
        sysfs_read: Some("a"),
        ..Guest::default()
    }
}

#[tokio::test]
async fn wait_ends_when_the_path_appears() {
    let stage = Stage::new();
    let path = stage.directory.path().join("sys/a");
    let load = async |milliseconds| {
        let module = waiting(milliseconds).module();
        stage.try_load(module, "sysfsRead: [a]").await.unwrap()
    };
    let patient = load(60_000).await;
    let call = a_call();
    let mut discovery = std::pin::pin!(patient.discover(&call, Trigger::Load));
    assert!(futures::poll!(&mut discovery).is_pending());
    std::fs::write(&path, "7\n").unwrap();
    assert_eq!(discovery.await.unwrap().device_count(), 0);
    let hurried = load(0).await;
    hurried.discover(&call, Trigger::Load).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    let trapped = hurried.discover(&call, Trigger::Load).await.unwrap_err();
    assert_eq!(trapped.code, "driver-trapped");
    let denied = stage.load(&waiting(0)).await;
    let denied = denied.discover(&call, Trigger::Load).await.unwrap_err();
    assert_eq!(denied.code, "not-granted");
}

#[tokio::test]
async fn deadline_of_the_call_ends_a_wait() {
    let stage = Stage::new();
    let grant = "sysfsRead: [a]\nlimits: {wallMs: 600}";
    let endless = stage.try_load(waiting(u32::MAX).module(), grant);
    let endless = endless.await.unwrap();
    let late = endless
        .discover(&a_call(), Trigger::Load)
        .await
        .unwrap_err();
    assert_eq!(late.code, "driver-deadline");
}
