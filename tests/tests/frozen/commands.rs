//! Output of commands for scripts, and their exit codes; the CDI files of the claims that they prepare.

use nodedock_tests::Root;

use crate::scene::{GPU, NIC, Scene, write_pod};
use crate::text::{normalised, without_volatile};
use crate::{assert_frozen, fixture};

/// Runs the commands of a recorded transcript, and compares what they print. A line `$ PROGRAM ARGUMENTS` is a command whose output and
/// exit code are recorded, `? PROGRAM ARGUMENTS` one with its exit code alone. `ROOT` is the daemon's root.
pub(crate) async fn assert_transcript(name: &str, root: &Root) {
    let path = root.path().to_str().expect("the root's path is text");
    let script = std::fs::read_to_string(fixture(name)).expect("read a transcript");
    let mut transcript = String::new();
    for line in script.lines() {
        let words = line.replace("ROOT", path);
        let words = Vec::from_iter(words.split(' '));
        let (sign, output) = match words.as_slice() {
            [sign @ ("$" | "?"), "nodedock", arguments @ ..] => (*sign, root.cli(arguments).await),
            [sign @ ("$" | "?"), "nodedockd", arguments @ ..] => {
                (*sign, root.run_node_program(arguments).await)
            }
            _ => continue,
        };
        let said = if sign == "$" {
            normalised(&output.stdout, root)
        } else {
            String::new()
        };
        let code = output.code.expect("no signal ends it");
        transcript.push_str(&format!("{line}\n{said}exit code {code}\n\n"));
    }
    assert!(!transcript.is_empty(), "{name} has no commands");
    assert_frozen(name, &transcript);
}

/// The CDI files, byte by byte but for the root.
pub(crate) fn cdi_files(root: &Root) -> String {
    let text = |path: std::path::PathBuf| std::fs::read_to_string(path).expect("read a CDI file");
    let files = root.cdi_files().into_iter();
    let files =
        files.map(|file| format!("== {}\n{}\n", file.path.display(), text(file.path.clone())));
    without_volatile(&files.collect::<String>(), root)
}

/// Runs every command that prints for scripts.
async fn play(name: &str) -> Scene {
    let scene = Scene::start().await;
    let gpu = |device: &str| format!("mock-gpu.nodedock.dev/{device}");
    write_pod(
        &scene.daemon,
        "two",
        &[("own", &gpu("gpus/gpu-1")), ("part", &gpu("shared/gpu-2"))],
        &[GPU, NIC],
    );
    write_pod(
        &scene.daemon,
        "greedy",
        &[("taken", &gpu("gpus/gpu-1"))],
        &[GPU],
    );
    write_pod(
        &scene.daemon,
        "native",
        &[("null", "null.example.com/null/null-0")],
        &[],
    );
    for claim in ["device-0", "device-1", "refuse-an-hour", "refuse-permanent"] {
        let device = format!("scripted.nodedock.dev/script/{claim}");
        write_pod(&scene.daemon, claim, &[(claim, &device)], &[]);
    }
    assert_transcript(name, &scene.daemon).await;
    scene
}

#[tokio::test]
async fn json_and_cdi_files_are_unchanged() {
    let scene = play("commands-json.txt").await;
    assert_frozen("cdi.txt", &cdi_files(&scene.daemon));
}

#[tokio::test]
async fn yaml_is_as_recorded() {
    play("commands-yaml.txt").await;
}

#[tokio::test]
async fn exit_codes_are_as_recorded() {
    assert_transcript("exit-codes.txt", &Scene::start().await.daemon).await;
}
