//! Whose turn it is at a path: from the putting back of a value to the end of its claim.

use std::time::Duration;

use super::*;
use crate::claims::values::{Doing, Errand, PutBacks};

async fn put_back(daemon: &Daemon, short: &str, deadline: Duration) -> PutBacks {
    let (id, call) = (claim(short, &[], &[]).id, Call { request_id: "test".into(), deadline });
    daemon.values.put_back(&id, |_| true, |_| false, Doing::PutBack, &Errand::of(&call)).await
}

const LONG: Duration = Duration::from_secs(45);

/// The earlier claim left the value to the later one, which had been put back and was about to end: the value stayed.
#[tokio::test]
async fn nobody_decides_about_a_value_between_its_putting_back_and_the_end_of_its_claim() {
    let home = Home::new();
    let (daemon, _) = two_stuck(&home).await;
    let later = put_back(&daemon, "two", LONG).await;
    assert_eq!(is(&home, LED), "1");
    let mut earlier = std::pin::pin!(put_back(&daemon, "one", LONG));
    assert!(futures::poll!(&mut earlier).is_pending());
    daemon.values.commit_changes(vec![Change::DeleteClaim(uid("uid-two"))]).await.unwrap();
    drop(later);
    assert_eq!(earlier.await.ends.iter().map(one).collect::<Vec<_>>(), [(LED, Some("1"), "put-back")]);
    assert_eq!(is(&home, LED), "0");
}

/// The later one had inherited what the earlier had found, and did not know the value that it had been put back to.
#[tokio::test]
async fn a_value_that_was_put_back_before_a_crash_is_known_whoever_ends_first() {
    for order in [["one", "two"], ["two", "one"]] {
        let home = Home::new();
        let (daemon, led) = two_stuck(&home).await;
        let lost = put_back(&daemon, "two", LONG).await;
        assert_eq!(is(&home, LED), "1");
        daemon.crash().await;
        drop((daemon, led, lost));
        let daemon = home.start();
        for claim in order {
            release(&daemon, claim).await;
        }
        assert_eq!(is(&home, LED), "0", "{order:?}");
    }
}

#[tokio::test]
async fn a_path_that_somebody_keeps_is_left_and_holds_up_no_other() {
    let home = Home::new();
    let (daemon, _) = one_stuck(&home, &[(LED, "1"), (FAN, "2")]).await;
    let _kept = daemon.values.turn(LED).await;
    tokio::time::pause();
    let released = release(&daemon, "one").await;
    assert_eq!(told(&released), [(FAN, Some("2"), "put-back"), (LED, None, "sysfs-stuck")]);
    assert_eq!((is(&home, LED), is(&home, FAN)), ("1".into(), "0".into()));
}

/// Hundreds of values of devices that do not answer held the claim for as many times ten seconds.
#[tokio::test]
async fn what_is_not_come_to_within_the_deadline_is_left_and_said() {
    let home = Home::new();
    let (daemon, _) = one_stuck(&home, &[(LED, "1"), (FAN, "2")]).await;
    let late = put_back(&daemon, "one", Duration::ZERO).await;
    let out_of_time = "put-back-out-of-time";
    let told: Vec<_> = late.ends.iter().map(one).collect();
    assert_eq!(told, [(FAN, None, out_of_time), (LED, None, out_of_time)]);
    assert_eq!((is(&home, LED), is(&home, FAN)), ("1".into(), "2".into()));
}
