//! A driver that is replaced by its twins in other languages while it holds a claim: the contract, and the memo, are all that
//! they share.

use nodedock_model::grant::Grant;
use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::drivers::side_file;
use nodedock_tests::golden::{
    self, ALL, Bench, C, GOLDEN, GOLDEN_FILE, GOLDEN_NAME, Golden, RUST, RUST_WASIP2,
};
use nodedock_tests::machine::sha256;
use nodedock_tests::wait::until_path;
use nodedock_tests::{Daemon, Options, Root, compiled};
use serde_json::json;

/// The files that there are; compiled, so that the daemon need not.
async fn built() -> Vec<(Golden, Vec<u8>)> {
    let bench = Bench::new(Some(golden::cache()));
    let mut built = Vec::new();
    for golden in ALL {
        if let Some(bytes) = golden.bytes() {
            bench
                .load(&bytes, Grant::empty())
                .await
                .expect("a driver loads with nothing granted");
            built.push((golden, bytes));
        }
    }
    built
}

/// A root whose daemon finds compiled what was compiled by the same code.
fn root_with_cache() -> Root {
    let root = Root::new();
    compiled::give(&root, &golden::cache()).expect("copy compiled drivers");
    root
}

/// Replaces the driver, and waits until the new one serves and has said what it has, and how many claims.
async fn replace(daemon: &Daemon, bytes: &[u8], claims: usize) {
    let before = daemon.log().len();
    let digest = format!("sha256:{}", sha256(bytes));
    daemon.drop_in(GOLDEN_FILE, bytes);
    daemon
        .until_driver(GOLDEN_FILE, |driver| {
            driver.digest == digest && driver.state == "serving"
        })
        .await;
    let line = format!("discovered devices=2 claims={claims}");
    let says = || {
        let log = daemon.log().split_off(before);
        let said = log
            .lines()
            .any(|entry| entry.contains(&line) && entry.contains(GOLDEN_NAME));
        said.then_some(()).ok_or(log)
    };
    until_path(&daemon.log_path(), &line, says).await;
}

fn request_for(golden: Golden, slot: usize) -> v1::PreparePodRequest {
    let device = format!("{GOLDEN_NAME}/slots/slot-{slot}");
    request(&pod(golden.build), &[&claim(golden.build, &[&device])])
}

#[tokio::test]
async fn each_unprepares_what_another_prepared() {
    let built = built().await;
    let daemon = Daemon::start_on(root_with_cache(), Options::default()).await;
    daemon.drop_in("golden.grant.yaml", side_file(GOLDEN, "grant"));
    let mut held: Option<Golden> = None;
    for (i, (golden, bytes)) in built.iter().enumerate() {
        replace(&daemon, bytes, usize::from(held.is_some())).await;
        daemon.prepared(request_for(*golden, i % 2)).await;
        daemon
            .until_log(&format!("prepared claim={}", golden.build))
            .await;
        let env = daemon
            .cdi_files()
            .iter()
            .flat_map(|file| file.env())
            .collect::<Vec<_>>();
        assert!(
            env.contains(&format!("GOLDEN_SLOT_{}=normal", i % 2)),
            "{env:?}"
        );
        if let Some(before) = held.replace(*golden) {
            unprepare(&daemon, before).await;
        }
    }
    // The first unprepares what the last prepared.
    let (_, first) = &built[0];
    replace(&daemon, first, 1).await;
    unprepare(&daemon, held.expect("those in Rust are always there")).await;
    assert!(daemon.claims().await.is_empty());
}

async fn unprepare(daemon: &Daemon, golden: Golden) {
    let name = golden.build.to_owned();
    assert_eq!(
        daemon.unprepare(&pod(golden.build)).await,
        [(name, "unprepared".to_owned())]
    );
    daemon
        .until_log(&format!("unprepared claim={}", golden.build))
        .await;
}

#[tokio::test]
async fn inspect_tells_the_profile() {
    let root = Root::new();
    // The others take long without a cache, and are held against their profiles in the list.
    for golden in [RUST, RUST_WASIP2, C] {
        let Some(bytes) = golden.bytes() else {
            continue;
        };
        let file = root.write(GOLDEN_FILE, bytes);
        let file = file.to_str().expect("UTF-8");
        let found = root
            .cli(&["driver", "inspect", file, "-o", "json"])
            .await
            .json();
        assert_eq!(found["profile"], json!(golden.profile.as_str()), "{found}");
        root.cli(&["driver", "inspect", file])
            .await
            .done_with(&[&format!("profile   {}\n", golden.profile.as_str())]);
    }
    let bad = root.write("bad.wasm", "not a driver");
    let text = root
        .cli(&["driver", "inspect", bad.to_str().expect("UTF-8")])
        .await
        .failed(1);
    assert!(!text.contains("profile"), "{text}");
}
