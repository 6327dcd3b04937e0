//! A full disk: new claims are refused, answered claims are not lost, and service resumes when there is space.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::machine::or_skip;
use nodedock_tests::{Daemon, Options, Root};

/// More than the allocated log of the checkpoint takes claims.
const GPUS: usize = 1000;

/// Writes until nothing more fits.
fn fill(file: &std::path::Path) {
    use std::io::Write;
    let mut file = std::fs::File::create(file).unwrap();
    for size in [4096, 1] {
        while file.write(&vec![0; size]).is_ok_and(|written| written > 0) {}
    }
}

/// A daemon with simulated GPUs.
async fn start_on(root: Root) -> Daemon {
    let daemon = Daemon::start_on(root, Options::default()).await;
    daemon.install_gpus(&format!("pools: [{{name: gpus, count: {GPUS}}}]\n"));
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon
}

fn one_gpu(index: usize) -> nodedock_proto::node::v1::PreparePodRequest {
    let name = format!("c-{index}");
    request(
        &pod(&name),
        &[&gpu_claim(&name, &[&format!("gpus/gpu-{index}")])],
    )
}

#[tokio::test]
async fn full_disk_refuses_new_claims_only() {
    let mut root = Root::new();
    let Some(()) = or_skip("a full disk", root.mounts.state("size=6m")) else {
        return;
    };
    let mut daemon = start_on(root).await;
    daemon.prepared(one_gpu(0)).await;
    let filler = daemon.state().join("filler");
    fill(&filler);
    let began = std::time::Instant::now();

    let mut prepared = vec![0];
    let problem = loop {
        let index = prepared.len();
        assert!(
            index < GPUS,
            "the disk is full, and {index} claims were prepared all the same"
        );
        let mut answer = daemon.prepare(one_gpu(index)).await;
        match answer.claims.remove(0).problem {
            None => prepared.push(index),
            Some(problem) => break problem,
        }
    };
    assert_eq!(
        (problem.kind.as_str(), problem.code.as_str()),
        ("unavailable", "checkpoint-disk-full")
    );
    let refused = prepared.len();
    assert_eq!(
        daemon.refused(one_gpu(refused)).await.code,
        "checkpoint-disk-full",
        "and so is the next"
    );
    for index in &prepared {
        let name = format!("c-{index}");
        assert_eq!(
            daemon
                .pod_devices(&pod(&name))
                .await
                .unwrap()
                .containers
                .len(),
            1,
            "{name}"
        );
        daemon.prepared(one_gpu(*index)).await;
    }
    assert_eq!(
        daemon
            .claims()
            .await
            .iter()
            .filter(|claim| claim.state == "prepared")
            .count(),
        refused
    );
    assert!(daemon.cdi_files().len() >= refused);

    // An unprepare is written as well, if in fewer pages: it is refused and repeated, not half done.
    let mut gone = 0;
    let kept = loop {
        let kept = daemon
            .unprepare_pod(&pod(&format!("c-{gone}")))
            .await
            .claims
            .remove(0);
        if kept.outcome != "unprepared" {
            break kept;
        }
        gone += 1;
    };
    assert_eq!(
        (kept.outcome.as_str(), kept.problem.unwrap().code.as_str()),
        ("refused", "checkpoint-disk-full")
    );
    daemon.prepared(one_gpu(gone)).await;
    daemon.until_conditions(&["checkpoint-disk-full"]).await;
    std::fs::remove_file(&filler).unwrap();
    // Without a request.
    daemon.until_conditions(&[]).await;
    daemon.prepared(one_gpu(refused)).await;
    // The log has the outage, and not each request and retry.
    daemon.until_log("the checkpoint takes writes again").await;
    let (log, minutes) = (daemon.log(), began.elapsed().as_secs() / 60);
    let lines = log.matches("the checkpoint takes no writes").count();
    assert!((1..=minutes as usize + 1).contains(&lines), "{log}");
    for line in ["commit to the checkpoint failed", "is still open"] {
        assert!(!log.contains(line), "{log}");
    }
    let name = format!("c-{gone}");
    assert_eq!(
        daemon.unprepare(&pod(&name)).await,
        [(name, "unprepared".to_owned())]
    );
    daemon.crash().await;
    let known = daemon.claims().await;
    assert_eq!(
        (
            known.len(),
            known.iter().all(|claim| claim.state == "prepared")
        ),
        (refused - gone, true),
        "{known:?}"
    );
}

#[tokio::test]
async fn claim_waits_for_cdi_file_space() {
    let mut root = Root::new();
    let Some(()) = or_skip("a full disk for CDI files", root.mounts.cdi("size=256k")) else {
        return;
    };
    let mut daemon = start_on(root).await;
    let known = daemon.prepared(one_gpu(0)).await;
    let filler = daemon.cdi().join("filler");
    fill(&filler);
    let problem = daemon
        .refused_as(one_gpu(1), "unavailable", "cdi-not-written")
        .await;
    assert!(
        problem.message.to_lowercase().contains("no space left"),
        "{problem:?}"
    );
    assert_eq!(daemon.prepared(one_gpu(0)).await, known);
    assert_eq!(daemon.cdi_files().len(), 1, "no half of a file is left");
    assert_eq!(daemon.claims().await.len(), 1, "nor a device that is held");
    // An unprepare needs no room there.
    assert_eq!(
        daemon.unprepare(&pod("c-0")).await,
        [("c-0".to_owned(), "unprepared".to_owned())]
    );
    std::fs::remove_file(&filler).unwrap();
    let other = request(&pod("other"), &[&gpu_claim("other", &["gpus/gpu-1"])]);
    daemon.prepared(other).await;
    daemon.crash().await;
    assert_eq!(daemon.only_claim().await.state, "prepared");
}
