//! Commits that were reported as failed and may be on the disk all the same.
//!
//! Story: a pod's exclusive claim was refused for a failed sync, its device went to another pod, and the file then had two
//! exclusive claims on one device, of which one was never answered.

use proptest::prelude::*;

use super::power::{RecordMap, model, open_on, put_claim, put_pod, records_on, start, start_on};
use super::*;

/// Number of operations that may succeed before one fails: more than a commit has.
const CREDITS: usize = 24;

/// A failed commit is not in the file for a reader of it, and the next one writes over it.
#[tokio::test]
async fn probe_and_close_erase_failed_commit() {
    for with_probe in [true, false] {
        for credit in 0..CREDITS {
            let (disk, _, checkpoint) = start();
            let mut state = RecordMap::new();
            let first = [put_claim(1, "old")];
            checkpoint.commit(first.to_vec()).await.unwrap();
            model(&mut state, &first);
            disk.refuse(io::ErrorKind::ReadOnlyFilesystem, credit);
            let refused = [put_claim(1, "refused"), put_pod(1, "refused")];
            if checkpoint.commit(refused.to_vec()).await.is_ok() {
                model(&mut state, &refused);
            }
            disk.accept();
            if with_probe {
                checkpoint.probe().await.unwrap();
                assert_eq!(records_on(disk.image()), state);
            }
            checkpoint.close().await;
            assert_eq!(records_on(disk.image()), state);
        }
    }
}

/// A claim whose end was refused is a claim, and its end may be committed again.
#[tokio::test]
async fn refused_end_leaves_the_claim() {
    for credit in 0..CREDITS {
        let (disk, _, checkpoint) = start();
        let claims = vec![put_claim(1, "old"), put_claim(2, "old")];
        checkpoint.commit(claims).await.unwrap();
        disk.refuse(io::ErrorKind::StorageFull, credit);
        let end = [
            Change::DeleteClaim(uid(1)),
            Change::PutEnded(Arc::new(ended(1))),
        ];
        let is_refused = checkpoint.commit(end.to_vec()).await.is_err();
        disk.accept();
        checkpoint.commit(vec![put_pod(3, "new")]).await.unwrap();
        let found = records_on(disk.image());
        assert_eq!(
            found.contains_key(&(Table::Claims, uid(1))),
            is_refused,
            "refused after {credit}: {found:?}"
        );
        checkpoint.commit(end.to_vec()).await.unwrap();
        checkpoint.close().await;
        let found = file::load(&mut open_on(&disk), &UPGRADES).unwrap();
        assert_eq!(found.ended, [ended(1)]);
        assert_eq!(found.claims.len(), 1);
    }
}

/// Two commits that fail after a number of operations each, with a power loss after each. Returns false if the first left no trace.
async fn lose_power_after_failures(credits: [usize; 2]) -> bool {
    let (disk, born, checkpoint) = start();
    let first = [put_claim(1, "old"), put_claim(2, "old")];
    checkpoint.commit(first.to_vec()).await.unwrap();
    let mut believed = RecordMap::new();
    model(&mut believed, &first);
    let mut allowed = vec![believed.clone()];
    let refused = [
        vec![put_claim(1, "one"), put_pod(1, "one")],
        vec![Change::DeleteClaim(uid(2))],
    ];
    for (refused, credit) in refused.into_iter().zip(credits) {
        disk.refuse(io::ErrorKind::StorageFull, credit);
        let outcome = checkpoint.commit(refused.clone()).await;
        disk.accept();
        let mut after = believed.clone();
        model(&mut after, &refused);
        match outcome {
            Ok(()) => (believed, allowed) = (after.clone(), vec![after]),
            Err(_) => allowed.push(after),
        }
        let ops = disk.ops();
        let seed = ops.len() as u64;
        let images = [
            cut(&born, &ops, || false),
            cut(&born, &ops, || true),
            cut(&born, &ops, coin(seed)),
        ];
        let found = images.map(records_on);
        for found in &found {
            assert!(
                allowed.contains(found),
                "refused after {credits:?}: {found:?} of {allowed:?}"
            );
        }
        if allowed.len() > 1 && found.iter().all(|found| *found == believed) {
            return false;
        }
    }
    true
}

#[tokio::test]
async fn power_loss_preserves_acknowledged_commits() {
    let mut traces = 0;
    for first in 0..CREDITS {
        for second in 0..CREDITS {
            match lose_power_after_failures([first, second]).await {
                true => traces += 1,
                // Then the second is irrelevant.
                false if second == 0 => break,
                false => {}
            }
        }
    }
    assert!(traces > 0, "a refused sync leaves the commit on the disk");
}

#[tokio::test]
async fn unreadable_value_is_kept_once() {
    for credit in 0..CREDITS {
        let (disk, _, checkpoint) = start();
        checkpoint.close().await;
        let unreadable = Stored {
            version: 9,
            record: b"{}",
        };
        let insert =
            |database: &mut Database| database.insert("claims", uid(1).as_str(), unreadable);
        open_on(&disk).transaction(insert).unwrap();
        let checkpoint = start_on(&disk);
        disk.refuse(io::ErrorKind::StorageFull, credit);
        // It fails, or all of it succeeds: the second write is correct in either case.
        let _ = checkpoint.commit(vec![put_claim(1, "first")]).await;
        disk.accept();
        checkpoint
            .commit(vec![put_claim(1, "second")])
            .await
            .unwrap();
        checkpoint.close().await;
        assert_eq!(
            open_on(&disk).unreadable().unwrap(),
            1,
            "refused after {credit} operations"
        );
    }
}

/// Concurrent requests, and the number of operations before the disk fails.
#[derive(Debug, Clone)]
struct Step {
    requests: Vec<Vec<(u8, usize)>>,
    credit: Option<usize>,
}

fn step() -> impl Strategy<Value = Step> {
    let request = proptest::collection::vec((0..4u8, 0..6usize), 1..4);
    let requests = proptest::collection::vec(request, 1..4);
    (requests, proptest::option::of(0..CREDITS))
        .prop_map(|(requests, credit)| Step { requests, credit })
}

fn changes(request: &[(u8, usize)], words: &str) -> Vec<Change> {
    let change = |(kind, n): &(u8, usize)| match kind {
        0 => put_claim(*n, words),
        1 => Change::DeleteClaim(uid(*n)),
        2 => put_pod(*n, words),
        _ => Change::DeletePod(uid(*n)),
    };
    request.iter().map(change).collect()
}

async fn failed_commits_never_happened(steps: Vec<Step>, seed: u64) {
    let (disk, born, checkpoint) = start();
    let mut believed = RecordMap::new();
    for (number, step) in steps.into_iter().enumerate() {
        match step.credit {
            Some(credit) => disk.refuse(io::ErrorKind::StorageFull, credit),
            None => disk.accept(),
        }
        let words = |n| format!("{number}-{n}");
        let requests: Vec<_> = step
            .requests
            .iter()
            .enumerate()
            .map(|(n, r)| changes(r, &words(n)))
            .collect();
        // The first does not wait, and the others for it.
        let (first, rest) = requests.split_first().unwrap();
        let leader = leader(&checkpoint, first.clone());
        let mut waiting: Vec<_> = rest
            .iter()
            .map(|changes| Box::pin(checkpoint.commit(changes.clone())))
            .collect();
        for commit in &mut waiting {
            assert!(futures::poll!(commit).is_pending());
        }
        let mut outcomes = vec![leader.lead().unwrap()];
        for commit in waiting {
            outcomes.push(commit.await);
        }
        for (changes, outcome) in requests.iter().zip(&outcomes) {
            outcome.iter().for_each(|()| model(&mut believed, changes));
        }
        if number % 5 == 4 {
            checkpoint.writer.server().upkeep();
        }
        if outcomes.last().is_some_and(Result::is_ok) {
            assert_eq!(records_on(disk.image()), believed);
            let ops = disk.ops();
            assert_eq!(
                records_on(cut(&born, &ops, || false)),
                believed,
                "and is durable"
            );
            assert_eq!(
                records_on(cut(&born, &ops, coin(seed + ops.len() as u64))),
                believed,
                "and is durable"
            );
        }
    }
    disk.accept();
    checkpoint.probe().await.unwrap();
    checkpoint.close().await;
    assert_eq!(records_on(disk.image()), believed);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn success_erases_earlier_failed_commits(
        steps in proptest::collection::vec(step(), 1..16),
        seed in any::<u32>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(failed_commits_never_happened(steps, seed.into()));
    }
}
