//! A full disk: nothing new is taken on, nothing that was answered is lost, and space is enough to go on.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::machine::{or_skip, skip};
use nodedock_tests::{Daemon, Options, Root};

const GPUS: usize = 200;

/// Writes until nothing more fits.
fn fill(file: &std::path::Path) {
    use std::io::Write;
    let mut file = std::fs::File::create(file).unwrap();
    for size in [4096, 1] {
        while file.write(&vec![0; size]).is_ok_and(|written| written > 0) {}
    }
}

#[tokio::test]
async fn a_full_disk_refuses_what_is_new_and_loses_nothing() {
    let mut root = Root::new();
    let Some(()) = or_skip("a full disk", root.mount_state("size=4m")) else { return };
    let mut daemon = Daemon::start_on(root, Options::default()).await;
    daemon.install_gpus(&format!("pools: [{{name: gpus, count: {GPUS}}}]\n"));
    daemon.until_serving(MOCK_GPU_FILE).await;
    let asked = |index: usize| {
        let name = format!("c-{index}");
        request(&pod(&name), &[&gpu_claim(&name, &[&format!("gpus/gpu-{index}")])])
    };
    daemon.prepared(asked(0)).await;
    let filler = daemon.state().join("filler");
    fill(&filler);

    let mut prepared = vec![0];
    let problem = loop {
        let index = prepared.len();
        assert!(index < GPUS, "the disk is full, and {index} claims were prepared all the same");
        let mut answer = daemon.prepare(asked(index)).await;
        match answer.claims.remove(0).problem {
            None => prepared.push(index),
            Some(problem) => break problem,
        }
    };
    assert_eq!((problem.kind.as_str(), problem.code.as_str()), ("unavailable", "checkpoint-disk-full"));
    let refused = prepared.len();
    assert_eq!(daemon.refused(asked(refused)).await.code, "checkpoint-disk-full", "and so is the next");
    for index in &prepared {
        let name = format!("c-{index}");
        assert_eq!(daemon.pod_devices(&pod(&name)).await.unwrap().containers.len(), 1, "{name}");
        daemon.prepared(asked(*index)).await;
    }
    assert_eq!(daemon.claims().await.iter().filter(|claim| claim.state == "prepared").count(), refused);
    assert!(daemon.cdi_files().len() >= refused);

    // An unprepare is written as well, and needs pages before it frees any: it is refused and repeated, not half done.
    let kept = daemon.unprepare_pod(&pod("c-0")).await.claims.remove(0);
    assert_eq!(
        (kept.outcome.as_str(), kept.problem.unwrap().code.as_str()),
        ("refused", "checkpoint-disk-full")
    );
    daemon.prepared(asked(0)).await;
    daemon.until_conditions(&["checkpoint-disk-full"]).await;
    std::fs::remove_file(&filler).unwrap();
    // Without a request.
    daemon.until_conditions(&[]).await;
    daemon.prepared(asked(refused)).await;
    let unprepared = daemon.unprepare(&pod("c-0")).await;
    assert_eq!(unprepared, [("c-0".to_owned(), "unprepared".to_owned())]);
    daemon.crash().await;
    let known = daemon.claims().await;
    assert_eq!(
        (known.len(), known.iter().all(|claim| claim.state == "prepared")),
        (refused, true),
        "{known:?}"
    );
}

/// A daemon with simulated GPUs, its state and its CDI files each on a small file system. The error says why it cannot be.
async fn on_small_disks() -> Result<Daemon, String> {
    let mut root = Root::new();
    root.mount_state("size=4m")?;
    root.mount_cdi("size=256k")?;
    let daemon = Daemon::start_on(root, Options::default()).await;
    daemon.install_gpus(&format!("pools: [{{name: gpus, count: {GPUS}}}]\n"));
    daemon.until_serving(MOCK_GPU_FILE).await;
    Ok(daemon)
}

fn one_gpu(index: usize) -> nodedock_proto::node::v1::PreparePodRequest {
    let name = format!("c-{index}");
    request(&pod(&name), &[&gpu_claim(&name, &[&format!("gpus/gpu-{index}")])])
}

#[tokio::test]
async fn without_room_for_cdi_files_a_claim_is_refused_and_prepared_when_there_is_room() {
    let mut daemon = match on_small_disks().await {
        Ok(daemon) => daemon,
        Err(why) => return skip("a full disk for CDI files", &why),
    };
    let known = daemon.prepared(one_gpu(0)).await;
    let filler = daemon.cdi().join("filler");
    fill(&filler);
    let problem = daemon.refused_as(one_gpu(1), "unavailable", "cdi-not-written").await;
    assert!(problem.message.to_lowercase().contains("no space left"), "{problem:?}");
    assert_eq!(daemon.prepared(one_gpu(0)).await, known);
    assert_eq!(daemon.cdi_files().len(), 1, "no half of a file is left");
    // An unprepare needs no room there.
    assert_eq!(daemon.unprepare(&pod("c-0")).await, [("c-0".to_owned(), "unprepared".to_owned())]);
    std::fs::remove_file(&filler).unwrap();
    daemon.prepared(one_gpu(1)).await;
    daemon.crash().await;
    assert_eq!(daemon.only_claim().await.state, "prepared");
}

/// Whether a full checkpoint can give something up depends on the free pages in it; either way what is said is what is.
#[tokio::test]
async fn with_both_disks_full_what_is_answered_is_what_a_restart_finds() {
    let mut daemon = match on_small_disks().await {
        Ok(daemon) => daemon,
        Err(why) => return skip("two full disks", &why),
    };
    for index in 0..3 {
        daemon.prepared(one_gpu(index)).await;
    }
    let fillers = [daemon.cdi().join("filler"), daemon.state().join("filler")];
    fillers.iter().for_each(|filler| fill(filler));
    let mut prepared = 3;
    while daemon.prepare(one_gpu(prepared)).await.claims[0].outcome == "prepared" {
        prepared += 1;
        assert!(prepared < GPUS, "the disks are full, and {prepared} claims were prepared all the same");
    }
    let end = daemon.unprepare_pod(&pod("c-0")).await.claims.remove(0);
    let unprepared = end.outcome == "unprepared";
    assert!(
        unprepared || end.problem.as_ref().is_some_and(|problem| problem.code == "checkpoint-disk-full"),
        "{end:?}"
    );

    fillers.iter().for_each(|filler| std::fs::remove_file(filler).unwrap());
    daemon.until_conditions(&[]).await;
    daemon.prepared(one_gpu(prepared)).await;
    if !unprepared {
        assert_eq!(daemon.unprepare(&pod("c-0")).await, [("c-0".to_owned(), "unprepared".to_owned())]);
    }
    daemon.crash().await;
    let mut found: Vec<_> = daemon.claims().await.into_iter().map(|claim| claim.id.unwrap().name).collect();
    found.sort_unstable();
    let mut expected: Vec<_> = (1..=prepared).map(|index| format!("c-{index}")).collect();
    expected.sort_unstable();
    assert_eq!(found, expected);
}
