"""An agent in another process, without any library: asks until the answer is ``done``, or without end."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

messages = [{"role": "user", "content": sys.argv[1]}]
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # must not outlive the episode
while True:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as response:
            message = json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError:
        continue  # as obstinate as some retrying clients are
    print(message["content"], flush=True)
    if message["content"] == "done":
        sys.exit(3)
    messages += [message, {"role": "user", "content": "go on"}]
