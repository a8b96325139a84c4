//! The `deuteron` command on one machine: what tasks are given, how they meet, how they fail and start again.
#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use deuteron_chaos::{Case, Directory, Ended, Hash, Launch, Process, Stamp, has_socket, script};
use deuteron_gang::{
    Accelerator, Host, Job, Outcome, Request, Result,
    discovery::Source,
    policy::Restarts,
    supervisor::{Control, run, run_invited},
};
use rustix::process::{Signal, geteuid};
use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

const DEUTERON: &str = env!("CARGO_BIN_EXE_launcher");
const TASK: &str = env!("CARGO_BIN_EXE_task");

fn deuteron(words: &[&str]) -> Command {
    let mut command = Command::new(DEUTERON);
    command.arg("run").args(words);
    command
}

fn start(words: &[&str]) -> Launch {
    Launch::start(deuteron(words))
}

/// Runs a job whose agents this test starts, and does `then` with each of them.
fn run_as_host(job: Job, then: impl Fn(usize, Child) + Clone + Send + 'static) -> Result<Outcome> {
    let agents: Arc<Mutex<Vec<thread::JoinHandle<()>>>> = Arc::default();
    let started = Arc::clone(&agents);
    let invite = move |agent: usize, line: String| {
        let mut command = Command::new(DEUTERON);
        let mut child = command.arg("agent").stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(line.as_bytes()).unwrap();
        let then = then.clone();
        started.lock().unwrap().push(thread::spawn(move || {
            then(agent, child);
            drop(stdin);
        }));
    };
    let outcome = run_invited(job, &Control::default(), invite, drop);
    agents.lock().unwrap().drain(..).for_each(|agent| agent.join().unwrap());
    outcome
}

#[test]
fn agents_may_come_by_themselves() {
    let _case = Case::after(warm_up, 30);
    let outcome = run_as_host(Job::invited(3, [TASK, "result", "5"]), |_, mut child| {
        child.wait().unwrap();
    });
    let results = outcome.unwrap().results;
    assert_eq!(results, (0..3).map(|rank| Some(vec![rank; 5])).collect::<Vec<_>>());
}

#[test]
fn an_invited_agent_that_is_killed_takes_its_rank_along() {
    let _case = Case::after(warm_up, 30);
    let outcome = run_as_host(Job::invited(2, ["sleep", "20"]), |agent, mut child| {
        if agent == 1 {
            thread::sleep(Duration::from_millis(500));
            child.kill().unwrap();
        }
        child.wait().unwrap();
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.starts_with("rank 1 on ") && error.contains("was lost"), "{error}");
}

/// Runs `text` in a shell as every task, and waits for the end.
fn shell(options: &[&str], text: &str) -> Ended {
    start(&[options, &["--", "sh", "-c", text]].concat()).end()
}

fn variables(ended: &Ended, rank: usize) -> BTreeMap<String, String> {
    let pairs = ended.of(rank).into_iter().filter_map(|line| line.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn status(path: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn tasks_know_who_they_are() {
    let _case = Case::within(30);
    let ended = start(&["-n", "4", "--env", "COLOUR=deep blue", "env"]).end();
    ended.expect(0, &["4 tasks on 1 host succeeded"]);
    let cores = thread::available_parallelism().unwrap().get();
    for rank in 0..4 {
        let given = variables(&ended, rank);
        let (rank, threads) = (rank.to_string(), (cores / 4).max(1).to_string());
        for (name, value) in [
            ("RANK", rank.as_str()),
            ("SIZE", "4"),
            ("LOCAL_RANK", &rank),
            ("LOCAL_SIZE", "4"),
            ("CROSS_RANK", "0"),
            ("CROSS_SIZE", "1"),
        ] {
            for prefix in ["DEUTERON", "HOROVOD"] {
                assert_eq!(given[&format!("{prefix}_{name}")], value, "{prefix}_{name}");
            }
        }
        assert_eq!(given["DEUTERON_GENERATION"], "0");
        assert_eq!(given["OMP_NUM_THREADS"], threads);
        assert_eq!(given["COLOUR"], "deep blue");
        assert!(!given.contains_key("CUDA_VISIBLE_DEVICES"));
    }

    // What the user has set stays, wherever it was set.
    let mut command = deuteron(&["-n", "2", "env"]);
    command.env("OMP_NUM_THREADS", "7");
    let inherited = Launch::start(command).end();
    let typed = start(&["-n", "2", "--env", "OMP_NUM_THREADS=7", "env"]).end();
    for ended in [inherited, typed] {
        assert_eq!(variables(&ended, 1)["OMP_NUM_THREADS"], "7");
    }
}

#[test]
fn tasks_meet() {
    let _case = Case::within(60);
    let ended = start(&["-n", "4", TASK, "meet"]).end();
    ended.expect(0, &[]);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    for rank in 0..4 {
        let said = ended.of(rank);
        let info = |rank| {
            format!("rank={rank} local={rank}/4 cross=0/1 host={host} address=127.0.0.1 devices=")
        };
        let infos: Vec<String> = (0..4).map(|rank| format!("INFO {}", info(rank))).collect();
        assert_eq!(said[..4], infos);
        assert_eq!(said[4], format!("OWN {}", info(rank)));
        assert_eq!(said[5], "GATHERED 0 of 4, 1 of 4, 2 of 4, 3 of 4");
        let barrier: u64 = said[6].strip_prefix("BARRIER ").unwrap().parse().unwrap();
        eprintln!("rank {rank}: the median barrier of 4 tasks takes {barrier} µs");
        assert!(barrier < 5000, "the median barrier took {barrier} µs");
        assert_eq!(said[7..], ["REDUCED shares_memory=true"; 2]);
    }
}

#[test]
fn a_rendezvous_with_a_task_that_has_ended_fails_and_says_who() {
    let _case = Case::within(30);
    let ended = start(&["-n", "3", TASK, "alone"]).end();
    ended.expect(3, &["exited with status 3", "rank 0 has ended"]);
    assert!(ended.took < Duration::from_secs(10), "it took {:?}", ended.took);
}

#[test]
fn it_starts_fast() {
    let _case = Case::within(30);
    let mut times: Vec<Duration> = (0..9)
        .map(|_| {
            let ended = start(&["-n", "2", "true"]).end();
            ended.expect(0, &[]);
            ended.took
        })
        .collect();
    times.sort();
    eprintln!("deuteron run -n 2 true takes {:?}, at best {:?}", times[4], times[0]);
    // Well under 150 ms on an idle machine; this one may be busy.
    assert!(times[0] < Duration::from_millis(600), "it takes {times:?}");
}

/// A job of the library, whose agent is this build's.
fn job(tasks: usize, words: &[&str], stamp: &Stamp) -> Job {
    let agent = ["env", stamp.variable(), DEUTERON, "agent"];
    Job { agent: agent.map(Into::into).into(), ..Job::local(tasks, words.iter().copied()) }
}

/// The library's event loop keeps the way on which it hears of signals.
fn warm_up() {
    let stamp = Stamp::on(&mut Command::new("true"));
    run(job(1, &["true"], &stamp), &Control::default(), drop).unwrap();
}

#[test]
fn results_come_back_in_rank_order() {
    let _case = Case::after(warm_up, 30);
    let stamp = Stamp::on(&mut Command::new("true"));
    for bytes in [0, 1, 65_536, 3_000_000] {
        let job = job(3, &[TASK, "result", &bytes.to_string()], &stamp);
        let outcome = run(job, &Control::default(), drop).unwrap();
        let expected: Vec<Option<Vec<u8>>> = (0..3).map(|rank| Some(vec![rank; bytes])).collect();
        assert!(outcome.results == expected, "{bytes} bytes have changed");
    }
    let outcome = run(job(2, &["true"], &stamp), &Control::default(), drop).unwrap();
    assert_eq!(outcome.results, [None, None]);
    stamp.gone_within(Duration::from_millis(500));
}

/// Runs tasks that look at a payload of so many bytes, and returns the most memory that an agent has had, in kB.
fn look_at_payload(mut job: Job, bytes: usize, generation: u64) -> u64 {
    job.payload = (0..bytes).map(|index| (index * 7 + index / 251) as u8).collect();
    let mut hash = Hash::default();
    hash.add(&job.payload);
    let expected = format!("{bytes} {} true ", hash.value());
    let tasks = job.tasks;
    let outcome = run(job, &Control::default(), drop).unwrap();
    assert_eq!((outcome.generation, outcome.results.len()), (generation, tasks));
    let most = outcome.results.iter().map(|result| {
        let text = String::from_utf8(result.clone().unwrap()).unwrap();
        let most = text.strip_prefix(&expected);
        assert!(most.is_some(), "{text}: not {expected}");
        most.unwrap().parse::<u64>().unwrap()
    });
    most.max().unwrap()
}

#[test]
fn a_payload_of_any_size_reaches_every_task() {
    let _case = Case::after(warm_up, 90);
    let stamp = Stamp::on(&mut Command::new("true"));
    for bytes in [0, 1, 65_535, 65_536, 65_537, 3_000_000] {
        look_at_payload(job(3, &[TASK, "payload"], &stamp), bytes, 0);
    }
    let start = Instant::now();
    let most = look_at_payload(job(2, &[TASK, "payload"], &stamp), 200_000_000, 0);
    eprintln!("200 MB to 2 tasks: {:?}, and the agent had at most {most} kB", start.elapsed());
    assert!(most < 250_000, "the agent holds it more than once: {most} kB");
    stamp.gone_within(Duration::from_millis(500));
}

#[test]
fn a_payload_is_there_after_a_restart() {
    let _case = Case::after(warm_up, 60);
    let stamp = Stamp::on(&mut Command::new("true"));
    // The agent stays, or it is another one that has to be told.
    for how in ["fail", "orphan"] {
        let mut job = job(2, &[TASK, "payload", how], &stamp);
        job.restarts = Restarts { most: 1, ..Restarts::default() };
        look_at_payload(job, 1_000_000, 1);
    }
    stamp.gone_within(Duration::from_millis(500));
}

#[test]
fn a_payload_crosses_to_other_hosts() {
    let _case = Case::after(warm_up, 60);
    let stamp = Stamp::on(&mut Command::new("true"));
    let directory = Directory::new();
    // Instead of going to another host it runs the command here; the agent then calls back with TLS.
    let ssh = directory.path().join("ssh");
    script(&ssh, "#!/bin/sh\nfor word; do :; done; exec sh -c \"$word\"\n");
    let mut job = job(4, &[TASK, "payload"], &stamp);
    job.ssh.program = ssh.into();
    job.interface = Some("127.0.0.1".into());
    let host = |name: &str| Host { name: name.into(), slots: 2 };
    job.hosts = vec![host("far1"), host("far2")];
    look_at_payload(job, 20_000_000, 0);
    stamp.gone_within(Duration::from_millis(500));
}

#[test]
fn a_failure_names_the_rank_and_how_it_ended() {
    let _case = Case::within(60);
    let directory = Directory::new();
    let file = directory.path().join("status.json");
    let file_text = file.display().to_string();
    let text = |case: &str| {
        format!("if [ $DEUTERON_RANK = 1 ]; then {case}; fi; while :; do sleep 0.05; done")
    };
    for (case, code, said, signal) in [
        ("exit 3", 3, "rank 1 on HOST exited with status 3", None),
        ("exit 75", 75, "rank 1 on HOST exited with status 75", None),
        ("kill -9 $$", 137, "rank 1 on HOST was killed by signal 9", Some(9)),
        ("kill -SEGV $$", 139, "rank 1 on HOST was killed by signal 11", Some(11)),
        (
            "echo quite fine; echo it was the cat >&2; exit 4",
            4,
            "rank 1 on HOST exited with status 4\nLOG   | it was the cat",
            None,
        ),
        ("echo only this; exit 4", 4, "status 4\nLOG   | only this", None),
    ] {
        let ended = shell(&["-n", "3", "--status-file", &file_text], &text(case));
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        ended.expect(code, &[&said.replace("HOST", &host)]);
        assert!(ended.took < Duration::from_secs(4), "{case} took {:?}", ended.took);
        let status = status(&file);
        let found = ["outcome", "rank", "host", "generation", "exit_code", "signal", "tasks"]
            .map(|key| status[key].clone());
        let expected = serde_json::json!(["task-failed", 1, host, 0, code, signal, 3]);
        assert_eq!(serde_json::json!(found), expected, "{status}");
        assert!(status["reason"].as_str().unwrap().starts_with("rank 1 on "), "{status}");
    }

    let traceback =
        "Traceback (most recent call last):\n  File \"train.py\", line 3\nValueError: no";
    let ended = start(&["-n", "2", TASK, "fail", traceback]).end();
    ended.expect(3, &["exited with status 3\nLOG   | Traceback", "LOG   | ValueError: no"]);
    let after = ended.lines.iter().skip_while(|line| !line.contains("  | Traceback"));
    assert!(!after.map(String::as_str).any(|line| line.contains("  | ERROR")), "{ended:?}");
}

#[test]
fn a_program_that_cannot_run_is_named() {
    let _case = Case::within(30);
    let directory = Directory::new();
    let file = directory.path().join("program");
    // It is there and may be executed, but no kernel knows how.
    script(&file, "#!/no/such/interpreter\n");
    let ended = start(&["-n", "2", file.to_str().unwrap()]).end();
    ended.expect(126, &["could not be started", "program cannot be run"]);
}

#[test]
fn what_was_asked_wrongly_starts_nothing() {
    let _case = Case::within(60);
    let directory = Directory::new();
    let file = directory.path().join("status.json");
    let file_text = file.display().to_string();
    let wrong = directory.path().join("wrong.toml");
    fs::write(&wrong, "tasks = \"many\"\n").unwrap();
    let wrong = wrong.display().to_string();
    for (words, code, outcome, said) in [
        (&["-n", "0", "true"][..], 64, "invalid", "at least 1"),
        (&["-n", "2"], 64, "invalid", "PROGRAM"),
        (&["-n", "2", "--no-such-thing", "true"], 64, "invalid", "--no-such-thing"),
        (&["-n", "2", "no-such-program"], 64, "invalid", "no-such-program is not found"),
        (&["-n", "3", "-H", "a:1,b:1", "true"], 64, "invalid", "2 slots"),
        (&["--config", &wrong, "true"], 78, "invalid", "wrong.toml"),
        (&["--config", "/nowhere.toml", "true"], 78, "invalid", "/nowhere.toml"),
        (&["-n", "2", "--agent", "false", "true"], 75, "not-assembled", "exited with status 1"),
        (
            &["-n", "2", "--agent", "sleep 60", "--start-timeout", "1s", "true"],
            75,
            "not-assembled",
            "localhost",
        ),
        (&["-n", "2", "--agent", "/nowhere/deuteron", "true"], 75, "not-assembled", "/nowhere"),
    ] {
        let _ = fs::remove_file(&file);
        let mut command = deuteron(words);
        command.env("DEUTERON_STATUS_FILE", &file_text);
        let ended = Launch::start(command).end();
        ended.expect(code, &[said]);
        let status = status(&file);
        assert_eq!(
            (status["outcome"].as_str(), status["exit_code"].as_i64()),
            (Some(outcome), Some(i64::from(code))),
            "{words:?}: {status}"
        );
    }
}

#[test]
fn the_others_have_their_grace_and_then_are_killed() {
    let _case = Case::within(60);
    let directory = Directory::new();
    let file = directory.path().join("cleaned");
    // Rank 0 cleans up, rank 2 does not listen, and rank 1 fails when both are ready.
    let text = format!(
        "case $DEUTERON_RANK in
        0) trap 'sleep 0.3; touch {0}; echo cleaned; exit 0' TERM; touch {0}.0 ;;
        1) while ! [ -e {0}.0 -a -e {0}.2 ]; do sleep 0.02; done; exit 5 ;;
        2) trap '' TERM; touch {0}.2 ;;
        esac; while :; do sleep 0.02; done",
        file.display()
    );
    let ended = shell(&["-n", "3", "--grace", "1.5s"], &text);
    ended.expect(5, &["[0] cleaned", "rank 1 on "]);
    assert!(file.exists());
    let most = Duration::from_secs(6);
    assert!(ended.took > Duration::from_millis(1500) && ended.took < most, "{:?}", ended.took);
}

#[test]
fn a_failure_is_told_before_the_others_have_ended() {
    let _case = Case::within(60);
    let text = "trap '' TERM; echo READY $$; while :; do sleep 0.05; done";
    for interrupted in [false, true] {
        let job = start(&["-n", "3", "--grace", "2.5s", "--", "sh", "-c", text]);
        let ready: Vec<String> = (0..3).map(|rank| job.line(&format!("[{rank}] READY "))).collect();
        let all = job.processes();
        let victim = all.iter().find(|process| process.pid.to_string() == ready[1]).unwrap();
        let event = Instant::now();
        victim.signal(Signal::KILL);
        if interrupted {
            thread::sleep(Duration::from_millis(50));
            job.signal(Signal::INT);
        }
        job.wait_until("who failed", |lines| {
            let named = |line: &String| line.contains("rank 1 on ") && line.contains("signal 9");
            lines.iter().any(named).then_some(())
        });
        assert!(event.elapsed() < Duration::from_secs(1), "it took {:?}", event.elapsed());
        job.end().expect(if interrupted { 130 } else { 137 }, &[]);
        assert!(event.elapsed() > Duration::from_secs(2), "it took {:?}", event.elapsed());
    }
}

#[test]
fn an_ordinary_user_can_do_all_of_it() {
    let _case = Case::within(60);
    if !geteuid().is_root() {
        return;
    }
    // The build's own directory may be closed to others.
    let directory = Directory::new();
    let programs = [DEUTERON, TASK].map(|program| {
        let copy = directory.path().join(Path::new(program).file_name().unwrap());
        fs::copy(program, &copy).unwrap();
        copy.display().to_string()
    });
    let nobody = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", &programs[0], "run"]);
        command.args(words).current_dir("/");
        Launch::start(command).end()
    };
    nobody(&["-n", "2", &programs[1], "meet"]).expect(0, &["REDUCED shares_memory=true"]);
    let text = "setsid sleep 100 & sleep 101 & sleep 0.1; kill -9 $$";
    nobody(&["-n", "2", "sh", "-c", text]).expect(137, &["was killed by signal 9"]);
}

#[test]
fn nothing_that_tasks_leave_behind_stays() {
    let _case = Case::within(60);
    // A child in the task's own group, and one that has gone as far away as it can, twice. `Launch::end` looks for them.
    let leave =
        "sleep 100 & setsid sleep 101 & setsid sh -c 'setsid sleep 102 & sleep 103' & sleep 0.1";
    for (rest, code) in [("exit 0", 0), ("exit 6", 6), ("kill -9 $$", 137)] {
        let ended = shell(&["-n", "2"], &format!("{leave}; {rest}"));
        ended.expect(code, &[]);
        assert!(ended.took < Duration::from_secs(5), "{rest} took {:?}", ended.took);
    }
}

#[test]
fn what_a_task_leaves_in_its_group_ends_with_it_and_not_with_the_gang() {
    let _case = Case::within(30);
    let text = "if [ $DEUTERON_RANK = 0 ]; then sleep 99 & exit 0; fi; echo READY; while :; do sleep 0.02; done";
    let job = start(&["-n", "2", "--", "sh", "-c", text]);
    job.line("[1] READY");
    let is = |process: &Process, word: &str| process.words.iter().any(|known| known == word);
    let end = Instant::now() + Duration::from_secs(5);
    let tasks = || job.processes().iter().filter(|process| is(process, "-c")).count() - 1;
    while job.processes().iter().any(|process| is(process, "99")) || tasks() > 1 {
        assert!(Instant::now() < end, "{:?}", job.processes());
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_gang_starts_again_as_the_next_generation() {
    let _case = Case::within(60);
    let directory = Directory::new();
    // Whoever finds the folder of its rank in its place overlaps with the generation before.
    let text = format!(
        "mkdir {0}/$DEUTERON_RANK || echo OVERLAP
        echo GENERATION $DEUTERON_GENERATION
        trap 'sleep 0.4; rmdir {0}/$DEUTERON_RANK; exit 0' TERM
        if [ $DEUTERON_RANK = 1 ]; then
            while ! [ -e {0}/ready.$DEUTERON_GENERATION ]; do sleep 0.02; done
            rmdir {0}/1
            [ $DEUTERON_GENERATION = 2 ] && exit 0
            sleep 0.2; echo number $DEUTERON_GENERATION >&2; exit $((5 + DEUTERON_GENERATION))
        fi
        touch {0}/ready.$DEUTERON_GENERATION
        [ $DEUTERON_GENERATION = 2 ] && rmdir {0}/0 && exit 0
        while :; do sleep 0.02; done",
        directory.path().display()
    );
    let file = directory.path().join("status.json");
    let output = directory.path().join("output");
    let options = [
        "-n",
        "2",
        "--restarts",
        "3",
        "--status-file",
        file.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
    ];
    let ended = shell(&options, &text);
    ended.expect(
        0,
        &[
            "LOG [1] number 0",
            "exited with status 5; restart 1 of 3 follows in 1.0 s",
            "LOG [1] number 1",
            "exited with status 6 in generation 1; restart 2 of 3 follows in 2.0 s",
            "succeeded in",
            "after 2 restarts",
        ],
    );
    assert!(!ended.lines.iter().any(|line| line.contains("OVERLAP")), "{ended:?}");
    for rank in 0..2 {
        assert_eq!(ended.of(rank), ["GENERATION 0", "GENERATION 1", "GENERATION 2"]);
    }
    assert!(
        ended.took > Duration::from_secs(3) && ended.took < Duration::from_secs(9),
        "{:?}",
        ended.took
    );
    let status = status(&file);
    assert_eq!((&status["outcome"], &status["generation"]), (&"succeeded".into(), &2.into()));
    let said = fs::read_to_string(output.join("rank.0/stdout")).unwrap();
    assert_eq!(
        said,
        "GENERATION 0\ndeuteron: generation 1 starts here\nGENERATION 1\ndeuteron: generation 2 starts here\n\
         GENERATION 2\n"
    );
}

#[test]
fn restarts_are_used_up() {
    let _case = Case::within(30);
    let directory = Directory::new();
    let file = directory.path().join("status.json");
    let options = ["-n", "2", "--restarts", "1", "--status-file", file.to_str().unwrap()];
    let ended = shell(&options, "[ $DEUTERON_RANK = 0 ] && exit 9; sleep 30");
    ended.expect(9, &["restart 1 of 1 follows", "exited with status 9 in generation 1"]);
    let status = status(&file);
    assert_eq!((&status["generation"], &status["exit_code"]), (&1.into(), &9.into()));
}

#[test]
fn every_task_sees_its_own_accelerators_only() {
    let _case = Case::within(60);
    let directory = Directory::new();
    let discover = directory.path().join("discover");
    let devices = r#"{"index": 0, "model": "H200", "uuid": "GPU-0", "memory": 150}, {"index": 1, "model": "H200", "uuid": "GPU-1", "memory": 150}, {"index": 2, "model": "H200", "uuid": "GPU-2", "memory": 150}, {"index": 3, "model": "T4", "uuid": "GPU-3", "memory": 15}"#;
    script(
        &discover,
        &format!("#!/bin/sh\ncat <<'END'\n{{\"name\": \"gpu\", \"devices\": [{devices}]}}\nEND\n"),
    );
    let by = ["--discovery-script", discover.to_str().unwrap()];
    let ended = start(
        &[&["-n", "2", "--accelerator", "/gpu", "--per-task", "2"], &by[..], &["env"]].concat(),
    )
    .end();
    ended.expect(0, &[]);
    let seen: Vec<String> =
        (0..2).map(|rank| variables(&ended, rank)["CUDA_VISIBLE_DEVICES"].clone()).collect();
    assert_eq!(seen, ["0,1", "2,3"]);

    let ended =
        start(&[&["-n", "2", "--accelerator", "/gpu/h200"], &by[..], &[TASK, "meet"]].concat())
            .end();
    ended.expect(
        0,
        &["[0] OWN rank=0", "devices=gpu/H200:0", "[1] OWN rank=1", "devices=gpu/H200:1"],
    );

    let many = ["-n", "2", "--accelerator", "/gpu/h200", "--per-task", "2"];
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let ended = start(&[&many[..], &by, &["true"]].concat()).end();
    ended.expect(75, &["cannot be placed", &host, "3"]);
    let ended = start(&[&many[..], &by, &["--optional", "env"]].concat()).end();
    ended.expect(0, &[&host, "without"]);
    let seen: Vec<String> =
        (0..2).map(|rank| variables(&ended, rank)["CUDA_VISIBLE_DEVICES"].clone()).collect();
    assert_eq!(seen, ["0,1", ""]);

    let fpga = directory.path().join("fpga");
    script(&fpga, "#!/bin/sh\necho '{\"name\": \"fpga\", \"addresses\": [\"4\", \"7\"]}'\n");
    let by = ["--discovery-script", fpga.to_str().unwrap()];
    let ended = start(&[&["-n", "2", "--accelerator", "/fpga"], &by[..], &["env"]].concat()).end();
    ended.expect(0, &[]);
    let seen: Vec<String> = (0..2)
        .map(|rank| variables(&ended, rank)["DEUTERON_FPGA_VISIBLE_DEVICES"].clone())
        .collect();
    assert_eq!(seen, ["4", "7"]);

    script(&fpga, "#!/bin/sh\necho the cable is loose >&2; exit 1\n");
    let ended = start(&[&["-n", "2", "--accelerator", "/fpga"], &by[..], &["true"]].concat()).end();
    ended.expect(75, &["the cable is loose", &host]);
}

#[test]
fn accelerators_may_be_listed() {
    let _case = Case::after(warm_up, 30);
    let stamp = Stamp::on(&mut Command::new("true"));
    let device = |index| Accelerator {
        kind: "gpu".into(),
        model: "NVIDIA H200".into(),
        index,
        uuid: format!("GPU-{index}"),
        memory: 100 << 30,
    };
    let mut job = job(
        2,
        &[
            "sh",
            "-c",
            "[ $CUDA_VISIBLE_DEVICES = $((DEUTERON_RANK * 2)),$((DEUTERON_RANK * 2 + 1)) ]",
        ],
        &stamp,
    );
    job.discovery = vec![Source::List((0..4).map(device).collect())];
    job.request = Some(Request {
        path: "/gpu/h200".parse().unwrap(),
        per_task: 2,
        memory: 80 << 30,
        required: true,
    });
    run(job, &Control::default(), drop).unwrap();
    assert!(std::env::var_os("CUDA_VISIBLE_DEVICES").is_none());
    stamp.gone_within(Duration::from_millis(500));
}

#[test]
fn a_killed_rank_is_named_on_the_terminal_within_a_second() {
    let _case = Case::within(60);
    let mut slowest = Duration::ZERO;
    for _ in 0..5 {
        let job = start(&["-n", "4", TASK, "wait"]);
        let ready: Vec<String> = (0..4).map(|rank| job.line(&format!("[{rank}] READY "))).collect();
        let words: Vec<&str> = ready[2].split(' ').collect();
        assert!(has_socket(words[1]));
        let all = job.processes();
        let victim = all.iter().find(|process| process.pid.to_string() == words[0]).unwrap();
        let event = Instant::now();
        victim.signal(Signal::KILL);
        let error = job.error();
        slowest = slowest.max(event.elapsed());
        assert!(
            error.contains("rank 2 on ") && error.contains("was killed by signal 9"),
            "{error}"
        );
        job.end().expect(137, &[]);
        let sockets = ready.iter().filter_map(|line| line.split(' ').nth(1));
        assert!(!sockets.into_iter().any(has_socket));
    }
    eprintln!("a killed rank is named after {slowest:?} at worst");
    assert!(slowest < Duration::from_secs(1), "it took {slowest:?}");
}
