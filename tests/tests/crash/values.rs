//! Death at each point of a write below `/sys` and of its restore: the previous value is known afterwards, and is restored.

use nodedock_base::failpoint::Point;
use nodedock_proto::node::v1;
use nodedock_tests::compose::pod;
use nodedock_tests::drivers::{Form, wasm};
use nodedock_tests::machine::skip;
use nodedock_tests::{Client, Daemon, Options, Root};
use scripted::{Script, ScriptedWrite};

use crate::driver::Wasm;
use crate::scene::{assert_killed, request_of};
use crate::{Place, every_pass};

pub(crate) const POINTS: [Point; 5] = [
    Point::SysfsWriteIntended,
    Point::SysfsWritten,
    Point::PutBackBegun,
    Point::PutBackWritten,
    Point::ReleasePutBack,
];

const CLAIM: &str = "device-0";
const POD: &str = "one";

/// A daemon with a `/sys` of its own, and a driver that writes there when it prepares.
struct Scene {
    daemon: Daemon,
    /// Bytes of the value as the kernel would have it.
    value: std::path::PathBuf,
}

impl Scene {
    /// The error says in one line why it cannot be.
    async fn start() -> Result<Self, String> {
        let mut root = Root::new();
        let sys = root.mounts.fake_sys()?;
        let path = scripted::WRITABLE;
        // An attribute of a device, to which a class has a link.
        let device = sys.join("devices/scripted");
        std::fs::create_dir_all(&device).expect("a new directory");
        std::fs::create_dir_all(sys.join("class")).expect("a new directory");
        std::os::unix::fs::symlink("../devices/scripted", sys.join("class/scripted"))
            .expect("a new link");
        let value = device.join("value");
        std::fs::write(&value, "0\n").expect("a new file");
        let write = Some(ScriptedWrite {
            path: path.to_owned(),
            value: "1".to_owned(),
        });
        let script = Script {
            devices: 1,
            write,
            ..Script::default()
        };
        root.install_scripted(&script);
        let daemon = Daemon::start_on(root, Options::default()).await;
        daemon.until_serving(scripted::NAME).await;
        Ok(Self { daemon, value })
    }

    fn value(&self) -> String {
        std::fs::read_to_string(&self.value)
            .expect("a file of the test")
            .trim()
            .to_owned()
    }

    /// Starts the daemon again, if it has died; that it dies by itself is an error.
    async fn again(&mut self) {
        assert_killed(self.daemon.ended().await);
        self.daemon.disarm();
        self.daemon.run().await;
    }

    /// Plays the steps, and returns whether the daemon died.
    async fn play(&mut self, point: Point, pass: u32) -> bool {
        self.daemon.kill9().await;
        self.daemon.arm(point, pass);
        self.daemon.run().await;
        self.daemon.until_serving(scripted::NAME).await;
        let mut died = false;
        let request = request_of::<Wasm>(POD, &[CLAIM]);
        if self.daemon.client().prepare_pod(request).await.is_err() {
            died = true;
            self.again().await;
            self.daemon.until_serving(scripted::NAME).await;
        } else {
            assert_eq!(self.value(), "1");
        }
        self.daemon.take_out("scripted.wasm");
        self.daemon.until_gone(scripted::NAME).await;
        let left = self.daemon.unprepare_pod(&pod(POD)).await;
        assert!(
            left.claims.iter().all(|claim| claim.problem.is_some()),
            "{left:#?}"
        );
        let claim = v1::ObjectRef {
            namespace: "default".into(),
            name: CLAIM.into(),
            uid: String::new(),
        };
        let release = v1::ReleaseClaimRequest {
            claim: Some(claim),
            dry_run: false,
        };
        if let Err(status) = self.daemon.client().release_claim(release).await {
            assert!(!died, "{status}\n{}", self.daemon.log());
            died = true;
            self.again().await;
            self.daemon.until("the release is finished", no_claim).await;
        }
        died
    }

    /// Nothing is left, and the driver is back.
    async fn check(&self) {
        assert_eq!(self.value(), "0", "{}", self.daemon.log());
        assert!(self.daemon.claims().await.is_empty());
        let request = v1::ListClaimsRequest {
            with_timeline: true,
            ..Default::default()
        };
        let answer = self
            .daemon
            .client()
            .list_claims(request)
            .await
            .expect("list claims")
            .into_inner();
        let released = answer.released.first().expect("it was released");
        let ends: Vec<_> = released
            .values
            .iter()
            .map(|value| value.end.as_str())
            .collect();
        assert!(matches!(ends[..], ["put-back" | "as-before"]), "{ends:?}");
        self.daemon
            .drop_in("scripted.wasm", wasm("scripted", Form::Core));
        self.daemon.until_serving(scripted::NAME).await;
    }
}

async fn no_claim(mut client: Client) -> Result<(), String> {
    let request = v1::ListClaimsRequest::default();
    let claims = client
        .list_claims(request)
        .await
        .map_err(|status| status.to_string())?
        .into_inner()
        .claims;
    if claims.is_empty() {
        Ok(())
    } else {
        Err(format!("{claims:?}"))
    }
}

#[tokio::test]
async fn crash_loses_no_sysfs_value() {
    let mut scene = match Scene::start().await {
        Ok(scene) => scene,
        Err(why) => return skip("values below /sys across crashes", &why),
    };
    for point in POINTS {
        every_pass(point, async |pass| {
            let _place = Place(format!("at pass {pass} of {point:?}"));
            let died = scene.play(point, pass).await;
            scene.check().await;
            died
        })
        .await;
    }
}
