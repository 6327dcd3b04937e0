//! Prepares that the host cannot store: the drivers are undone, and no device is held.

use std::io::ErrorKind::StorageFull;
use std::sync::Arc;

use crate::checkpoint::tests::{Disk, new_disk};
use crate::manager::claims::fixtures::{claim, driver, pod};
use crate::manager::tests::scene::{Daemon, FakeDriver, Home, ends};
use nodedock_model::ClaimState;

/// A daemon on a disk, whose driver `gpu` can change the node, and the claims `one` of pod `a` and `two` of pod `b` of the same device.
fn with_disk() -> (Home, Disk, Daemon, Arc<FakeDriver>) {
    let (home, disk, gpu) = (Home::new(), new_disk(), FakeDriver::new(driver("gpu")));
    let daemon = home.start_on(&disk);
    daemon.serve(&gpu);
    daemon.source.put(claim("one", &["gpu/0"], &[&pod("a")]));
    daemon.source.put(claim("two", &["gpu/0"], &[&pod("b")]));
    (home, disk, daemon, gpu)
}

/// Prepares the claim `one`, while the disk gets full during the call of its driver.
async fn prepare_while_filling(daemon: &Daemon, disk: &Disk, gpu: &FakeDriver) -> Vec<String> {
    let a = pod("a");
    gpu.shut(true);
    let fill = async {
        gpu.called(|calls| calls.prepare.len() == 1).await;
        disk.refuse(StorageFull, 0);
        gpu.shut(false);
    };
    let (outcome, ()) = tokio::join!(daemon.prepare(&a, &["one"]), fill);
    ends(&outcome).into_iter().map(str::to_owned).collect()
}

#[tokio::test]
async fn refused_intent_holds_no_device() {
    let (_home, disk, daemon, gpu) = with_disk();
    disk.refuse(StorageFull, 0);
    let outcome = daemon.prepare(&pod("a"), &["one"]).await;
    assert_eq!(ends(&outcome), ["checkpoint-disk-full"]);
    assert_eq!(gpu.counts(), (0, 0));
    assert!(daemon.is_empty());
    disk.accept();
    assert_eq!(
        ends(&daemon.prepare(&pod("b"), &["two"]).await),
        ["prepared"]
    );
}

#[tokio::test]
async fn unstored_result_is_undone() {
    let (home, disk, daemon, gpu) = with_disk();
    let refused = prepare_while_filling(&daemon, &disk, &gpu).await;
    assert_eq!(refused, ["checkpoint-disk-full"]);
    assert_eq!(gpu.counts(), (1, 0), "the checkpoint may have the result");
    let again = daemon.prepare(&pod("a"), &["one"]).await;
    assert_eq!(ends(&again), ["checkpoint-disk-full"], "with the reason");

    disk.accept();
    daemon.starts.unprepares();
    daemon.gone("uid-one").await;
    assert_eq!(gpu.counts(), (1, 1));
    assert!(daemon.cdi_files().is_empty());
    assert_eq!(
        ends(&daemon.prepare(&pod("b"), &["two"]).await),
        ["prepared"]
    );
    daemon.stop().await;
    let daemon = home.start_on(&disk);
    assert_eq!(
        (daemon.state("uid-one"), daemon.state("uid-two")),
        (None, Some(ClaimState::Prepared))
    );
}

/// The disk gets full at any write after the call of the driver, and no file can be written: what the next start finds as prepared was not undone.
#[tokio::test]
async fn claim_found_prepared_was_not_undone() {
    let mut found = Vec::new();
    for credit in 0..16 {
        let (home, disk, daemon, gpu) = with_disk();
        gpu.shut(true);
        let (a, cdi) = (pod("a"), daemon.cdi.clone());
        let fill = async {
            gpu.called(|calls| calls.prepare.len() == 1).await;
            std::fs::remove_dir_all(&cdi).unwrap();
            std::fs::write(&cdi, "no directory").unwrap();
            disk.refuse(StorageFull, credit);
            gpu.shut(false);
        };
        let (outcome, ()) = tokio::join!(daemon.prepare(&a, &["one"]), fill);
        assert_ne!(ends(&outcome), ["prepared"]);
        daemon.stop().await;
        let is_undone = gpu.counts().1 > 0;
        disk.accept();
        std::fs::remove_file(&cdi).unwrap();
        std::fs::create_dir(&cdi).unwrap();
        let state = home.start_on(&disk).state("uid-one");
        found.push((is_undone, state));
    }
    assert!(
        !found.contains(&(true, Some(ClaimState::Prepared))),
        "{found:?}"
    );
    let kept = (false, Some(ClaimState::Prepared));
    let undone = (true, Some(ClaimState::Unpreparing));
    assert!(
        found.contains(&kept) && found.contains(&undone),
        "{found:?}"
    );
}

/// Its pod has it from before, and keeps it: the checkpoint has the result.
#[tokio::test]
async fn prepared_claim_outlives_refused_repetition() {
    let (_home, _disk, daemon, gpu) = with_disk();
    assert_eq!(
        ends(&daemon.prepare(&pod("a"), &["one"]).await),
        ["prepared"]
    );
    let file = daemon.cdi_files().remove(0);
    let cdi = file.parent().unwrap().to_owned();
    std::fs::remove_dir_all(&cdi).unwrap();
    std::fs::write(&cdi, "no directory").unwrap();
    let again = daemon.prepare(&pod("a"), &["one"]).await;
    assert_eq!(ends(&again), ["cdi-not-written"]);
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Prepared));
    assert_eq!(gpu.counts(), (1, 0));
}
