//! The lock of a path: from the restore of a value to the end of its claim.

use std::time::Duration;

use super::*;
use crate::records::table::Undo;
use crate::records::values::{RestoreRequest, Restored, RestoredDrivers, Restorer};

async fn restore(daemon: &Daemon, short: &str, deadline: Duration) -> Restored {
    let (id, call) = (
        claim(short, &[], &[]).id,
        Call {
            request_id: "test".into(),
            deadline,
        },
    );
    let drivers = RestoredDrivers {
        restorer: |_: &_| Some(Restorer::Host),
        stays: |_: &_| false,
    };
    daemon
        .values
        .restore(&id, &drivers, &RestoreRequest::of(&call))
        .await
}

const LONG: Duration = Duration::from_secs(45);

/// The earlier claim left the value to the later one, which had been restored and was about to end: the value stayed.
#[tokio::test]
async fn value_stays_locked_until_claim_ends() {
    let home = Home::new();
    let (daemon, _) = two_stuck(&home).await;
    let later = restore(&daemon, "two", LONG).await;
    assert_eq!(is(&home, LED), "1");
    let mut earlier = std::pin::pin!(restore(&daemon, "one", LONG));
    assert!(futures::poll!(&mut earlier).is_pending());
    daemon
        .manager
        .records
        .commit(vec![Change::DeleteClaim(uid("uid-two"))], Undo::default())
        .await
        .unwrap();
    drop(later);
    assert_eq!(
        earlier.await.values.iter().map(one).collect::<Vec<_>>(),
        [(LED, Some("1"), "put-back")]
    );
    assert_eq!(is(&home, LED), "0");
}

/// The later one had inherited what the earlier had found, and did not know the value that it had been restored to.
#[tokio::test]
async fn restored_value_is_known_after_crash() {
    for order in [["one", "two"], ["two", "one"]] {
        let home = Home::new();
        let (daemon, led) = two_stuck(&home).await;
        let lost = restore(&daemon, "two", LONG).await;
        assert_eq!(is(&home, LED), "1");
        daemon.crash().await;
        drop((daemon, led, lost));
        let daemon = home.start();
        for claim in order {
            daemon.release(claim).await.unwrap();
        }
        assert_eq!(is(&home, LED), "0", "{order:?}");
    }
}

#[tokio::test]
async fn locked_path_delays_no_other() {
    let home = Home::new();
    let (daemon, _) = one_stuck(&home, &[(LED, "1"), (FAN, "2")]).await;
    let _kept = daemon.values.lock_path(LED).await;
    tokio::time::pause();
    let released = daemon.release("one").await.unwrap();
    assert_eq!(
        outcomes(&released),
        [(FAN, Some("2"), "put-back"), (LED, None, "sysfs-stuck")]
    );
    assert_eq!((is(&home, LED), is(&home, FAN)), ("1".into(), "0".into()));
}

/// Hundreds of values of devices that do not answer held the claim for as many times ten seconds.
#[tokio::test]
async fn values_past_deadline_are_reported() {
    let home = Home::new();
    let (daemon, _) = one_stuck(&home, &[(LED, "1"), (FAN, "2")]).await;
    let late = restore(&daemon, "one", Duration::ZERO).await;
    let out_of_time = "put-back-out-of-time";
    let values: Vec<_> = late.values.iter().map(one).collect();
    assert_eq!(values, [(FAN, None, out_of_time), (LED, None, out_of_time)]);
    assert_eq!((is(&home, LED), is(&home, FAN)), ("1".into(), "2".into()));
}
