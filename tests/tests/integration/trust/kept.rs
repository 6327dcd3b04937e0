//! Files of versions that were replaced: they are run for their claims as long as they are trusted.

use nodedock_tests::compose::{pod, request};
use nodedock_tests::versions::{FILE, claim, file, script, with_unprepare};
use nodedock_tests::{Daemon, Options, assert_parts};
use scripted::Command;

use super::keys::{Configure, Signer, trust};

const SIGNATURE: &str = "scripted.wasm.sig";
const CHANGED: &str = "the trust in driver files changed";
const OLD: (&str, Signer, &str) = ("old", Signer::P256(1), "");
const NEW: (&str, Signer, &str) = ("new", Signer::Ed25519(2), "");

/// A daemon on which `v1`, signed by the old key, prepared claims that `v2`, signed by the new one, refuses to unprepare.
async fn with_refused(claims: &[&str]) -> (Daemon, String) {
    let daemon =
        Daemon::start_with(Options::default().config(&trust("enforce", &[OLD, NEW], ""))).await;
    daemon.drop_in_script(&script(1));
    daemon.drop_in(SIGNATURE, OLD.1.sign(&file("v1")));
    let old = daemon.swap("v1", &script(1)).await;
    for name in claims {
        daemon.prepared(request(&pod(name), &[&claim(name)])).await;
    }
    daemon.drop_in(SIGNATURE, NEW.1.sign(&file("v2")));
    daemon
        .swap(
            "v2",
            &with_unprepare(script(2), claims, Command::RefusePermanent),
        )
        .await;
    (daemon, old)
}

async fn outcome(daemon: &Daemon, name: &str) -> String {
    daemon.unprepare(&pod(name)).await.remove(0).1
}

#[tokio::test]
async fn version_with_removed_key_is_refused() {
    let (daemon, old) = with_refused(&["device-0", "device-1"]).await;
    let signature = daemon
        .kept_drivers()
        .join(format!("{}.wasm.sig", &old["sha256:".len()..]));
    assert_eq!(
        std::fs::read_to_string(&signature).unwrap(),
        OLD.1.sign(&file("v1"))
    );
    // It is loaded from now on, and judged all the same.
    assert_eq!(outcome(&daemon, "device-0").await, "unprepared");
    daemon.put_config(&trust("enforce", &[NEW], ""));
    daemon.until_log(CHANGED).await;
    let refused = daemon
        .unprepare_pod(&pod("device-1"))
        .await
        .claims
        .remove(0);
    let problem = refused.problem.expect("it is refused");
    assert_eq!(
        (refused.outcome.as_str(), problem.code.as_str()),
        ("refused", "driver-refused")
    );
    assert_eq!(
        problem.details["predecessor-code"],
        "predecessor-distrusted"
    );
    let reason = &problem.details["predecessor-problem"];
    assert_parts(
        reason,
        &[
            "version 0.1.0",
            "by a key of the config (new)",
            &signature.display().to_string(),
        ],
    );
    daemon
        .until_kept(&[&old, &daemon.until_serving(FILE).await.digest])
        .await;
    std::fs::write(&signature, NEW.1.sign(&file("v1"))).unwrap();
    assert_eq!(outcome(&daemon, "device-1").await, "unprepared");
    assert_eq!(daemon.claims().await, []);
    daemon
        .until_kept(&[&daemon.until_serving(FILE).await.digest])
        .await;
}

#[tokio::test]
async fn previous_version_needs_trust_or_warning() {
    let (daemon, old) = with_refused(&["device-0", "device-1"]).await;
    daemon.put_config(&trust("warn", &[NEW], ""));
    daemon.until_log(CHANGED).await;
    assert_eq!(outcome(&daemon, "device-0").await, "unprepared");
    daemon
        .until_log("is needed for its claims, and not trusted")
        .await;
    let new = daemon.until_serving(FILE).await.digest;
    let pins = |digests: &str| format!("pins: {{scripted: [{digests}]}}");
    let until_pinned = async |digests: &str| {
        daemon.put_config(&trust("enforce", &[], &pins(digests)));
        let is_pinned = |driver: &nodedock_proto::node::v1::Driver| {
            driver
                .trust
                .as_ref()
                .is_some_and(|trust| trust.pin == "scripted" && trust.key.is_empty())
        };
        daemon.until_driver(FILE, is_pinned).await;
    };
    until_pinned(&format!("'{new}'")).await;
    assert_eq!(outcome(&daemon, "device-1").await, "refused");
    daemon.put_config(&trust("enforce", &[], &pins(&format!("'{new}', '{old}'"))));
    daemon.cli(&["driver", "reload", FILE]).await.done();
    daemon
        .until_claims("its pin is back", <[_]>::is_empty)
        .await;
}
