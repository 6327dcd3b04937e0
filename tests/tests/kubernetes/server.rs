//! A control plane of real Kubernetes code, one for all tests of this program: the API server, and the controllers that allocate and free
//! claims.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use nodedock_tests::go::{KUBERNETES_VERSION_FLAGS, Module};
use nodedock_tests::machine::or_skip;
use serde_json::{Value, json};

/// Address of a running API server, and other data about the control plane that the tests need.
#[derive(Debug)]
pub(crate) struct Server {
    /// The program with every part of Kubernetes.
    pub(crate) program: PathBuf,
    /// Kubeconfig of a user who may do everything.
    pub(crate) admin: PathBuf,
    /// A line of JSON for each answered request.
    pub(crate) audit_log: PathBuf,
    url: String,
    certificate: String,
    /// The processes end when their standard input does: with this program.
    _processes: [Child; 2],
}

/// The control plane, started at the first call. None, and a line that says why, on a machine that cannot have it.
pub(crate) async fn server() -> Option<&'static Server> {
    static SERVER: OnceLock<Result<Server, String>> = OnceLock::new();
    let started = tokio::task::spawn_blocking(|| SERVER.get_or_init(Server::start)).await;
    let started = started.expect("the control plane starts");
    or_skip("real Kubernetes", started.as_ref().map_err(String::clone))
}

impl Server {
    fn start() -> Result<Self, String> {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let program = module(KUBERNETES_VERSION_FLAGS, None).program("kubernetes")?;
        // The server removes it at its end.
        let dir = tempfile::Builder::new()
            .prefix("nodedock-api-server-")
            .tempdir();
        let dir = dir
            .expect("a directory in the place for temporary files")
            .keep();
        let log = |part: &str| target.join(format!("kubernetes-{part}.log"));
        let mut server = part(
            &program,
            "api-server",
            &log("api-server"),
            &["--dir".as_ref(), dir.as_ref()],
        );
        let ready = first_event(&mut server, &log("api-server"));
        let text = |field: &str| {
            ready[field]
                .as_str()
                .expect("the server says it")
                .to_owned()
        };
        let (url, certificate) = (text("url"), text("ca"));
        let admin = dir.join("admin.kubeconfig");
        std::fs::write(&admin, kubeconfig(&url, &certificate, &text("token")))
            .expect("write a kubeconfig");
        let flags = ["--kubeconfig".as_ref(), admin.as_ref()];
        let controllers = part(&program, "controllers", &log("controllers"), &flags);
        let processes = [server, controllers];
        Ok(Self {
            program,
            admin,
            audit_log: text("audit").into(),
            url,
            certificate,
            _processes: processes,
        })
    }

    /// The text of a kubeconfig for the user of a token.
    pub(crate) fn kubeconfig(&self, token: &str) -> String {
        kubeconfig(&self.url, &self.certificate, token)
    }
}

/// The kubelet's DRA manager of the newest Kubernetes that the docs name. None, and a line that says why, on a machine that cannot have it.
pub(crate) async fn newest_dra_manager() -> Option<PathBuf> {
    let build = || module("-s -w", Some("dra-manager.mod")).program("dra-manager");
    let built = tokio::task::spawn_blocking(build).await;
    let built = built.expect("the build ends");
    or_skip("the kubelet's DRA manager of Kubernetes 1.37", built)
}

fn module(linker_flags: &'static str, requirements: Option<&'static str>) -> Module<'static> {
    Module {
        sources: Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/kubernetes"),
        output: Path::new(env!("CARGO_TARGET_TMPDIR")).join("interop"),
        fetch_seconds: 900,
        build_seconds: 1800,
        linker_flags,
        requirements,
    }
}

/// Starts a part of Kubernetes, with pipes for input and output.
fn part(program: &Path, name: &str, log: &Path, args: &[&std::ffi::OsStr]) -> Child {
    let log = std::fs::File::create(log).expect("the target directory can be written");
    let mut command = Command::new(program);
    command
        .arg(name)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log);
    command
        .spawn()
        .unwrap_or_else(|error| panic!("start {name}: {error}"))
}

/// The first line of a process, which bounds the wait for it.
fn first_event(process: &mut Child, log: &Path) -> Value {
    let mut line = String::new();
    let output = process.stdout.as_mut().expect("it is piped");
    BufReader::new(output)
        .read_line(&mut line)
        .expect("read the output of a child");
    serde_json::from_str(&line).unwrap_or_else(|_| {
        let log = std::fs::read_to_string(log).unwrap_or_default();
        panic!("the API server does not start:\n{log}")
    })
}

fn kubeconfig(url: &str, certificate: &str, token: &str) -> String {
    use base64::Engine as _;
    let certificate = base64::engine::general_purpose::STANDARD.encode(certificate);
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority-data": certificate}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    });
    format!("{config:#}\n")
}
