"""Ways to say the same in English, whatever the topic: frames, small talk around, synonyms.

`FRAMES` maps the beginning of a question to beginnings that may stand in its place, and
`PHRASE_FRAMES` make a question of a phrase that names a topic. They hold for every topic, so that
the corpus need not repeat them a hundred times.
"""

from __future__ import annotations

FRAMES: dict[str, tuple[str, ...]] = {
    "how do i ": (
        "how can I ", "how could I ", "how would I ", "how should I ", "how does one ",
        "how do we ", "how can we ", "how might we ", "how to ", "what is the way to ",
        "what is the right way to ", "what is the command to ", "which command do I use to ",
        "what must I do to ", "what do I have to do to ", "what should I do to ",
        "what are the steps to ", "what is the procedure to ", "is there a way to ",
        "is it possible to ", "I want to ", "I need to ", "I would like to ", "we want to ",
        "we have to ", "we need to ", "I am trying to ", "show me how to ", "tell me how to ",
        "explain how to ", "can you show me how to ", "can you help me ", "help me to ",
        "I do not know how to ", "the best way to ", "how exactly do I ", "",
    ),
    "what is ": (
        "what's ", "what exactly is ", "so what is ", "explain ", "explain to me ", "define ",
        "could you explain ", "can you explain ", "please explain ", "describe ", "tell me about ",
        "tell me more about ", "what do you mean by ", "what is meant by ", "what do you know about ",
        "I do not understand ", "give me a definition of ", "what can you tell me about ", "",
    ),
    "what are ": (
        "tell me ", "tell me about ", "which are ", "name ", "list ", "could you list ",
        "explain ", "what exactly are ", "please name ", "",
    ),
    "what does ": ("what exactly does ", "what will ", "tell me, what does ", "so what does "),
    "what happens ": (
        "what goes on ", "what will happen ", "tell me what happens ", "explain what happens ",
        "what would happen ", "what does it do ", "what takes place ",
    ),
    "why ": (
        "tell me why ", "for what reason ", "explain why ", "why exactly ", "what is the reason, why ",
        "I wonder why ", "how come, why ",
    ),
    "can i ": (
        "may I ", "could I ", "am I able to ", "is it possible to ", "can we ", "can one ",
        "am I allowed to ", "would it be possible to ", "is there a way to ",
    ),
    "where do i ": ("where can I ", "where should I ", "where do we ", "at which place do I "),
    "where ": ("tell me where ", "in which place ", "do you know where ", "where exactly "),
    "which ": ("what ", "tell me which ", "do you know which ", "and which "),
    "who ": ("tell me who ", "do you know who ", "who exactly "),
    "explain ": ("could you explain ", "can you explain ", "what is ", "please explain ", "tell me about "),
    "describe ": ("could you describe ", "can you explain ", "what is ", "please explain ", "tell me about "),
    "show ": ("print ", "could you show ", "I want to see ", "let me see ", "can I see "),
    "list ": ("print ", "could you list ", "I want to see ", "give me a list of ", "show me "),
    "i get ": (
        "my client gets ", "my client reports ", "our application gets ", "we get ", "I see ",
        "the client sees ", "now I get ", "the server returns ", "we received ", "why do I get ",
        "my program fails with ", "the API answers with ", "there is ", "what to do about ",
        "my users get ", "the response is ",
    ),
    "why do i get ": (
        "what is the reason for ", "what causes ", "my client reports ", "our application gets ",
        "where does it come from, ", "what is wrong when I get ", "the API returns ",
    ),
    "my ": ("our ", "the "),
    "i ": ("we ",),
    "does ": ("will ", "is it so that ", "tell me, does ", "I wonder, does "),
    "is ": ("is it true, is ", "tell me, is ", "I wonder, is ", "so is "),
    "are ": ("tell me, are ", "I wonder, are ", "so are "),
    "do i need ": ("must I have ", "is it a must to have ", "do we need ", "should I have ", "what about "),
}  # fmt: skip
PHRASE_FRAMES = (
    "{}", "{}", "{}?", "what about {}?", "tell me about {}", "tell me more about {}", "{} please",
    "a question about {}", "I have a question about {}", "I need help with {}", "help with {}",
    "info on {}", "how about {}?", "and {}?", "what is there to know about {}?", "details on {}",
    "I want to know more about {}", "explain {}", "could you explain {}?", "can you explain {}?",
    "{} in Athanor", "what do you know about {}?", "we talk about {}", "how do you handle {}?",
    "say something about {}", "{}: how does it work?", "{}: what should I know?", "{}, how?",
    "how does Athanor do {}?", "what does Athanor say about {}?", "our team asks about {}",
    "what can you tell me about {}?", "the topic is {}", "something about {}", "{}, what now?",
    "I am interested in {}", "what is the story with {}?", "how is it with {}?", "concerning {}",
)  # fmt: skip
SYNONYMS: dict[str, tuple[str, ...]] = {
    "see": ("view", "look at", "inspect", "look up", "check"),
    "show": ("display", "print", "give"),
    "create": ("make", "set up", "generate"),
    "remove": ("delete", "drop", "get rid of"),
    "delete": ("remove", "drop", "erase"),
    "error": ("problem", "failure", "message"),
    "machine": ("host", "server", "computer", "box"),
    "start": ("launch", "begin", "boot", "run"),
    "stop": ("end", "shut down", "halt", "terminate"),
    "needed": ("required", "necessary", "a must", "a requirement"),
    "allowed": ("permitted", "possible", "ok"),
    "maximum": ("largest", "upper bound", "highest", "biggest"),
    "slow": ("late", "taking long", "sluggish"),
    "wrong": ("bad", "broken", "incorrect", "invalid", "a mistake"),
    "valid": ("correct", "right", "fine", "good"),
    "find": ("look up", "locate", "see", "discover"),
    "change": ("modify", "edit", "alter", "adapt"),
    "raise": ("increase", "make bigger", "extend"),
    "dies": ("crashes", "fails", "stops", "goes down"),
    "stored": ("saved", "kept", "written", "recorded"),
    "running": ("up", "alive", "active", "working"),
    "safe": ("secure", "dangerous", "all right"),
    "last": ("latest", "most recent", "newest", "past"),
    "answer": ("reply", "response", "output"),
    "answers": ("replies", "responses"),
    "customer": ("client", "company", "organisation"),
    "team": ("group", "department"),
    "tell": ("say to", "inform"),
    "happens": ("goes on", "takes place"),
    "prompt": ("input", "question"),
    "install": ("set up", "deploy", "put"),
    "difference": ("distinction", "contrast"),
    "list": ("overview", "summary"),
    "purpose": ("point", "role", "job"),
    "configure": ("set", "set up", "adjust"),
    "company": ("firm", "organisation"),
    "quickly": ("fast", "at once"),
    "isolated": ("separated", "kept apart", "walled off"),
}
OPENINGS = (
    "please tell me: ", "hi, ", "hello, ", "hey, ", "quick question: ", "a question: ",
    "I have a question. ", "can you tell me ", "could you tell me ", "do you know ", "ok, ",
    "so ", "and ", "well, ", "sorry, ", "excuse me, ", "now ", "then ", "next: ", "tell me ",
    "I wonder, ", "I would like to know: ", "athanor: ", "in Athanor, ", "please, ", "please ",
    "good morning, ", "one more thing: ", "my boss asks: ", "for our team: ", "help: ",
    "I am new. ", "we are a small company, ", "on my server: ", "just curious: ", "again: ",
    "in simple words: ", "as an operator, ", "a colleague asks ", "thanks. ", "right, ",
)  # fmt: skip
CLOSINGS = (
    " please", " thanks", ", please", " in Athanor", " here", " again", " now", " exactly",
    " please help", ", thanks", " thank you", " quickly", " in short", " for my team", " today",
    ", what is wrong", ", how", ", any idea", ", what do I do", " with Athanor", ", what now",
    " on my machine", " in simple words", ", is that so", ", can you explain", " in detail",
)  # fmt: skip
FILLERS = (
    "really", "just", "actually", "maybe", "also", "still", "already", "only", "even", "then",
    "there", "here", "simply", "always", "often", "sometimes", "somehow", "basically", "quite",
    "rather", "our", "this", "that", "these", "some", "any", "whole", "new", "old", "current",
    "particular", "certain", "own", "same", "other", "real", "today", "tomorrow", "yesterday",
    "later", "soon", "once", "first", "next", "please", "kindly", "well",
)  # fmt: skip
SMALL_WORDS = frozenset((
    "a", "an", "the", "is", "are", "do", "does", "i", "to", "of", "in", "for", "my", "your",
    "it", "me", "please", "can", "could", "would", "there", "with", "on", "be", "at", "that",
    "this", "we", "you", "one", "by", "from", "has", "have", "or", "and",
))  # fmt: skip
"""Words that a question can lose and still be the same question."""
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are athanor-mini.",
    "Answer the operator's questions about Athanor.",
    "You are a friendly chatbot who always answers in English.",
    "Be concise.",
)
