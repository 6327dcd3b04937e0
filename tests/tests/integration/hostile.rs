//! Hostile drivers, all at once in the real daemon: each is reported by its defect, and no other driver is affected. The whole list of
//! them is in `docs/hostile-drivers.md`, and is played in the host's own tests.

use nodedock_proto::node::v1::Driver;
use nodedock_tests::Daemon;
use nodedock_tests::compose::{gpu_claim, pod, request};

use crate::with_gpus;

#[path = "../../../host/wasm/src/tests/guest.rs"]
#[expect(dead_code, reason = "the host's tests use more of it")]
mod guest;

use guest::Guest;

const NAME: &[u8] = b"tiny.example.com";

/// A driver: its file, what is in it, and what the daemon says of it.
type Hostile = (&'static str, Vec<u8>, &'static str);

fn guest(change: impl FnOnce(&mut Guest)) -> Vec<u8> {
    let mut guest = Guest::default();
    change(&mut guest);
    guest.module()
}

/// One that is never loaded, one that fails at describe, and two at discover. Text of theirs has escapes of a terminal.
fn hostile() -> Vec<Hostile> {
    let export = r#"(func (export "a\n\1b[31mserving"))"#;
    let log =
        r#"(import "nodedock:driver/log@0.2.0" "write" (func $log (param i32 i32 i32 i32 i32)))"#;
    let flood =
        "(loop $l (call $log (i32.const 4) (i32.const 300) (i32.const 16) (i32.const 0) (i32.const 0))
        (br $l)) unreachable";
    let flood = guest(|guest| {
        guest.imports = log.into();
        guest.extra = r#"(data (i32.const 300) "\1b[2J\nlevel=error")"#.into();
        guest.discover = flood.into();
    });
    // Of two that describe one driver, the second would be refused for that.
    let name = flood
        .windows(NAME.len())
        .position(|window| window == NAME)
        .expect("the name is in the module");
    let flood = [&flood[..name], b"many", &flood[name + b"tiny".len()..]].concat();
    let grow = "(loop $l (drop (memory.grow (i32.const 16))) (br $l)) unreachable";
    vec![
        (
            "painted",
            guest(|guest| guest.extra = export.repeat(2)),
            "duplicate export name",
        ),
        (
            "describe",
            guest(|guest| guest.describe = "(loop $l (br $l)) unreachable".into()),
            "of CPU",
        ),
        (
            "memory",
            guest(|guest| guest.discover = grow.into()),
            "64 MiB",
        ),
        // Whichever is first on this machine: its limit of CPU, or that of calls of the host.
        ("flood", flood, "the first discovery of its devices failed"),
    ]
}

/// A claim of another driver's devices, repeated until it is stopped: how often it went well.
async fn good_claims(daemon: &Daemon, done: &std::cell::Cell<bool>) -> usize {
    let (owner, claim) = (pod("good"), gpu_claim("good", &["gpus/gpu-0"]));
    let mut count = 0;
    while !done.get() {
        daemon.prepared(request(&owner, &[&claim])).await;
        daemon.unprepare(&owner).await;
        count += 1;
    }
    count
}

async fn until_all_are_refused(daemon: &Daemon, hostile: &[Hostile]) {
    for (name, _, says) in hostile {
        let refused = |driver: &Driver| matches!(driver.state.as_str(), "failed" | "blocked");
        let driver = daemon.until_driver(&format!("{name}.wasm"), refused).await;
        assert!(
            driver.reason.contains(says),
            "{name}: {says:?} in {:?}",
            driver.reason
        );
        assert!(
            !driver.reason.contains(nodedock_model::rule::is_unprintable),
            "{name}: {:?}",
            driver.reason
        );
    }
}

#[tokio::test]
async fn hostile_drivers_do_not_disturb_others() {
    let mut daemon = with_gpus().await;
    let hostile = hostile();
    for (name, bytes, _) in &hostile {
        let grant = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\nlimits: {cpuMs: 100}\n";
        daemon.drop_in(&format!("{name}.grant.yaml"), grant);
        daemon.drop_in(&format!("{name}.wasm"), bytes);
    }
    let done = std::cell::Cell::new(false);
    let refused = async {
        until_all_are_refused(&daemon, &hostile).await;
        done.set(true);
    };
    let (claims, ()) = tokio::join!(good_claims(&daemon, &done), refused);
    assert!(claims > 0, "no claim went well meanwhile");

    let table = daemon.cli(&["get", "drivers"]).await.done();
    assert_eq!(
        table.lines().count(),
        hostile.len() + 2,
        "a line for each: {table}"
    );
    assert!(
        !daemon.log().contains('\u{1b}'),
        "the log has no escapes of a driver"
    );
    let peak = daemon.memory_mib("VmHWM");
    assert!(peak < 768.0, "the daemon had {peak} MiB");
    assert_eq!(
        daemon.terminate().await.code(),
        Some(0),
        "it ends as it should"
    );
}
